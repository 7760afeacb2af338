// A few rows taken in order by a whole team. Where there are lanes enough, lane i holds the i-th of those present, so
// that asking for it costs no memory access.
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
  using Element = Row;

  JAX_EP_FN Lineup(const Team& team, int count, TermOf term_of)
      : team_(team), term_of_(term_of), count_(count), mine_{nullptr, 0}, present_(0) {
    if (!cached()) return;
    if (count > 0) mine_ = term_of(team.lane < count ? team.lane : count - 1);  // all lanes ask together
    close_ranks(team.ballot(team.lane < count && mine_.row));
  }

  // Whether every lane holds a term; then also how many there are, the one of this lane, and the i-th weight.
  JAX_EP_FN bool cached() const { return Team::lanes > 1 && count_ <= Team::lanes; }
  JAX_EP_FN int present() const { return present_; }
  JAX_EP_FN Term<Row> mine() const { return mine_; }
  JAX_EP_FN float weight(int i) const { return team_.from_lane(mine_.weight, i); }

  JAX_EP_FN bool empty() const { return !walk().next().row; }

  // Walks through the terms; all lanes see the same ones.
  class Walk {
   public:
    JAX_EP_FN explicit Walk(const Lineup& lineup) : lineup_(&lineup) {}

    JAX_EP_FN Term<Row> next() {
      if (lineup_->cached()) {
        if (index_ >= lineup_->present_) return {nullptr, 0};
        const int i = index_++;
        return {lineup_->team_.from_lane(lineup_->mine_.row, i), lineup_->weight(i)};
      }
      while (index_ < lineup_->count_)
        if (const Term<Row> term = lineup_->term_of_(index_++); term.row) return term;
      return {nullptr, 0};
    }

   private:
    const Lineup* lineup_;
    int index_ = 0;
  };

  JAX_EP_FN Walk walk() const { return Walk(*this); }

 private:
  // Moves the terms of the lanes in `holders` to the first lanes.
  JAX_EP_FN void close_ranks(uint64_t holders) {
    int source = team_.lane;
    for (; holders; holders &= holders - 1, ++present_)
      if (team_.lane == present_) source = lowest_bit(holders);
    mine_ = {team_.from_lane(mine_.row, source), team_.from_lane(mine_.weight, source)};
    if (team_.lane >= present_) mine_.row = nullptr;
  }

  const Team& team_;
  const TermOf term_of_;
  const int count_;
  Term<Row> mine_;
  int present_;
};

template <class Row, class TermOf>
JAX_EP_FN Lineup<Row, TermOf> line_up(const Team& team, int count, TermOf term_of) {
  return Lineup<Row, TermOf>(team, count, term_of);
}

}  // namespace jax_ep
