// A few rows that a whole coop takes in order. If there are enough lanes, each lane holds one row, and asking for a row
// costs no memory access.
#pragma once

#include <type_traits>

#include "comm/platform.h"

namespace jax_ep {

// A row and its factor. A null row stands for no row.
template <class Row>
struct WeightedRow {
  Row* row;
  float weight;
};

// A bit for each lane of a coop.
using Lanes = std::conditional_t<(Coop::lanes > 32), uint64_t, uint32_t>;

// The lanes [0, width).
JAX_EP_FN Lanes first_lanes(int width) {
  return width < Coop::lanes ? (Lanes{1} << width) - 1 : static_cast<Lanes>(~uint64_t{0});
}

// The lanes of the sum to which the first lane of `left` belongs; each sum has `stride` lanes.
JAX_EP_FN Lanes lanes_of_first_sum(Lanes left, int stride) {
  const int lane = lowest_bit(left);
  return first_lanes(stride) << (lane - lane % stride);
}

// Terms in the lanes of a coop, at most one in each, in the order of lanes: those of one sum, or of several sums, each
// in `stride` neighbouring lanes.
template <class Row>
class LaneTerms {
 public:
  JAX_EP_FN LaneTerms(const Coop& coop, WeightedRow<Row> mine, Lanes holders, int stride = Coop::lanes)
      : coop_(&coop), mine_(mine), holders_(holders), stride_(stride) {}
  // No terms. A default constructor with a null coop would keep the coop out of registers.
  JAX_EP_FN explicit LaneTerms(const Coop& coop) : LaneTerms(coop, {nullptr, 0}, 0) {}

  JAX_EP_FN bool cached() const { return true; }
  JAX_EP_FN const LaneTerms& in_lanes() const { return *this; }
  JAX_EP_FN int stride() const { return stride_; }
  // The terms in some of the lanes.
  JAX_EP_FN LaneTerms within(Lanes lanes) const {
    const bool mine = lanes >> coop_->lane & 1;
    return {*coop_, {mine ? mine_.row : nullptr, mine_.weight}, holders_ & lanes};
  }
  JAX_EP_FN Lanes holders() const { return holders_; }
  // mine(): this lane's row, or null. before(): how many rows the lanes before it have.
  JAX_EP_FN Row* mine() const { return mine_.row; }
  JAX_EP_FN int before() const { return count_bits(holders_ & lanes_before()); }
  JAX_EP_FN Lanes lanes_before() const { return first_lanes(coop_->lane); }
  JAX_EP_FN int present() const { return count_bits(holders_); }
  JAX_EP_FN float weight_in(int lane) const { return coop_->from_lane(mine_.weight, lane); }

  // All lanes see the same terms, and null past the last.
  class Walk {
   public:
    JAX_EP_FN explicit Walk(const LaneTerms& terms) : terms_(&terms), left_(terms.holders_) {}
    JAX_EP_FN WeightedRow<Row> next() {
      if (!left_) return {nullptr, 0};
      const int lane = lowest_bit(left_);
      left_ &= left_ - 1;
      return {terms_->coop_->from_lane(terms_->mine_.row, lane), terms_->weight_in(lane)};
    }

   private:
    const LaneTerms* terms_;
    Lanes left_;
  };

  JAX_EP_FN Walk walk() const { return Walk(*this); }

 private:
  const Coop* coop_;
  WeightedRow<Row> mine_;
  Lanes holders_;
  int stride_;
};

// The terms among term_of(0) .. term_of(count - 1) that have a row.
template <class Row, class TermOf>
class Terms {
 public:
  JAX_EP_FN Terms(const Coop& coop, int count, TermOf term_of)
      : coop_(coop), term_of_(term_of), count_(count), held_(coop) {
    if (!cached()) return;
    WeightedRow<Row> mine{nullptr, 0};
    if (count > 0) mine = term_of(coop.lane < count ? coop.lane : count - 1);  // all lanes ask together
    if (coop.lane >= count) mine.row = nullptr;
    held_ = {coop, mine, static_cast<Lanes>(coop.ballot(mine.row))};
  }

  // Whether the lanes hold the terms.
  JAX_EP_FN bool cached() const { return Coop::lanes > 1 && count_ <= Coop::lanes; }
  JAX_EP_FN const LaneTerms<Row>& in_lanes() const { return held_; }

  JAX_EP_FN bool empty() const { return !walk().next().row; }

  class Walk {
   public:
    JAX_EP_FN explicit Walk(const Terms& terms) : terms_(&terms), held_(terms.held_.walk()) {}

    JAX_EP_FN WeightedRow<Row> next() {
      if (terms_->cached()) return held_.next();
      while (index_ < terms_->count_)
        if (const WeightedRow<Row> term = terms_->term_of_(index_++); term.row) return term;
      return {nullptr, 0};
    }

   private:
    const Terms* terms_;
    typename LaneTerms<Row>::Walk held_;
    int index_ = 0;
  };

  JAX_EP_FN Walk walk() const { return Walk(*this); }

 private:
  const Coop& coop_;
  const TermOf term_of_;
  const int count_;
  LaneTerms<Row> held_;
};

// Calls visit(term) for each term, in order.
template <class Terms, class Visit>
JAX_EP_FN void for_each_term(const Terms& terms, Visit visit) {
  auto walk = terms.walk();
  for (auto term = walk.next(); term.row; term = walk.next()) visit(term);
}

template <class Row, class TermOf>
JAX_EP_FN Terms<Row, TermOf> terms_of(const Coop& coop, int count, TermOf term_of) {
  return Terms<Row, TermOf>(coop, count, term_of);
}

}  // namespace jax_ep
