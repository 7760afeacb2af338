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

// Terms held by the lanes of a team: lane i has the i-th of those present.
template <class Row>
class Held {
 public:
  JAX_EP_FN Held(const Team& team, Term<Row> mine, int present) : team_(&team), mine_(mine), present_(present) {}
  JAX_EP_FN explicit Held(const Team& team) : Held(team, {nullptr, 0}, 0) {}

  JAX_EP_FN bool cached() const { return true; }
  JAX_EP_FN const Held& held() const { return *this; }
  JAX_EP_FN int present() const { return present_; }
  JAX_EP_FN Row* mine() const { return mine_.row; }
  JAX_EP_FN float weight(int i) const { return team_->from_lane(mine_.weight, i); }

  // Walks through the terms; all lanes see the same ones, and null behind the last.
  class Walk {
   public:
    JAX_EP_FN explicit Walk(const Held& held) : held_(&held) {}
    JAX_EP_FN Term<Row> next() {
      if (index_ >= held_->present_) return {nullptr, 0};
      const int i = index_++;
      return {held_->team_->from_lane(held_->mine_.row, i), held_->weight(i)};
    }

   private:
    const Held* held_;
    int index_ = 0;
  };

  JAX_EP_FN Walk walk() const { return Walk(*this); }

 private:
  const Team* team_;
  Term<Row> mine_;
  int present_;
};

// The terms among term_of(0) .. term_of(count - 1) that have a row.
template <class Row, class TermOf>
class Lineup {
 public:
  JAX_EP_FN Lineup(const Team& team, int count, TermOf term_of)
      : team_(team), term_of_(term_of), count_(count), held_(team) {
    if (!cached()) return;
    Term<Row> mine{nullptr, 0};
    if (count > 0) mine = term_of(team.lane < count ? team.lane : count - 1);  // all lanes ask together
    held_ = close_ranks(mine, team.ballot(team.lane < count && mine.row));
  }

  // Whether the lanes hold the terms.
  JAX_EP_FN bool cached() const { return Team::lanes > 1 && count_ <= Team::lanes; }
  JAX_EP_FN const Held<Row>& held() const { return held_; }

  JAX_EP_FN bool empty() const { return !walk().next().row; }

  class Walk {
   public:
    JAX_EP_FN explicit Walk(const Lineup& lineup) : lineup_(&lineup), held_(lineup.held_.walk()) {}

    JAX_EP_FN Term<Row> next() {
      if (lineup_->cached()) return held_.next();
      while (index_ < lineup_->count_)
        if (const Term<Row> term = lineup_->term_of_(index_++); term.row) return term;
      return {nullptr, 0};
    }

   private:
    const Lineup* lineup_;
    typename Held<Row>::Walk held_;
    int index_ = 0;
  };

  JAX_EP_FN Walk walk() const { return Walk(*this); }

 private:
  // Moves the terms of the lanes in `holders` to the first lanes.
  JAX_EP_FN Held<Row> close_ranks(Term<Row> mine, uint64_t holders) const {
    int source = team_.lane, present = 0;
    for (; holders; holders &= holders - 1, ++present)
      if (team_.lane == present) source = lowest_bit(holders);
    mine = {team_.from_lane(mine.row, source), team_.from_lane(mine.weight, source)};
    if (team_.lane >= present) mine.row = nullptr;
    return {team_, mine, present};
  }

  const Team& team_;
  const TermOf term_of_;
  const int count_;
  Held<Row> held_;
};

template <class Row, class TermOf>
JAX_EP_FN Lineup<Row, TermOf> line_up(const Team& team, int count, TermOf term_of) {
  return Lineup<Row, TermOf>(team, count, term_of);
}

}  // namespace jax_ep
