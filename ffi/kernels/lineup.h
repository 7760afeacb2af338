// A few rows taken in order by a whole team: a lane knows each, if there are lanes enough, so that asking again costs
// no memory access.
#pragma once

#include "device/platform.h"

namespace jax_ep {

// A row and what it is multiplied by; a null row stands for none.
template <class Row>
struct Term {
  Row* row;
  float weight;
};

// The terms among term_of(0) .. term_of(count - 1) that have a row.
template <class Row, class TermOf>
class Lineup {
 public:
  JAX_EP_FN Lineup(const Team& team, int count, TermOf term_of)
      : team_(team), term_of_(term_of), count_(count), mine_{nullptr, 0}, present_(0) {
    if (Team::lanes == 1 || count > Team::lanes) return;
    if (team.lane < count) mine_ = term_of(team.lane);
    present_ = team.ballot(mine_.row != nullptr);
  }

  // Walks through the terms; all lanes see the same ones.
  class Walk {
   public:
    JAX_EP_FN explicit Walk(const Lineup& lineup) : lineup_(lineup), left_(lineup.present_) {}

    JAX_EP_FN Term<Row> next() {
      if (Team::lanes == 1 || lineup_.count_ > Team::lanes) {
        while (index_ < lineup_.count_)
          if (const Term<Row> term = lineup_.term_of_(index_++); term.row) return term;
        return {nullptr, 0};
      }
      if (!left_) return {nullptr, 0};
      const int lane = lowest_bit(left_);
      left_ &= left_ - 1;
      return {lineup_.team_.from_lane(lineup_.mine_.row, lane), lineup_.team_.from_lane(lineup_.mine_.weight, lane)};
    }

   private:
    const Lineup& lineup_;
    uint64_t left_;
    int index_ = 0;
  };

  JAX_EP_FN Walk walk() const { return Walk(*this); }

 private:
  const Team& team_;
  const TermOf term_of_;
  const int count_;
  Term<Row> mine_;
  uint64_t present_;
};

template <class Row, class TermOf>
JAX_EP_FN Lineup<Row, TermOf> line_up(const Team& team, int count, TermOf term_of) {
  return Lineup<Row, TermOf>(team, count, term_of);
}

}  // namespace jax_ep
