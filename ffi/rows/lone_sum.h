// Sums of rows by a team of one lane: a few values at a time over all rows, so that they stay in registers.
#pragma once

#include "rows/lineup.h"
#include "rows/numeric.h"

namespace jax_ep {

// The rows of a lineup, looked up once.
template <class Row>
class FewRows {
 public:
  template <class Rows>
  JAX_EP_FN explicit FewRows(const Rows& rows) {
    auto walk = rows.walk();
    Term<Row> next = walk.next();
    for (; next.row && count_ < kMost; next = walk.next()) rows_[count_++] = next;
    all_ = !next.row;
  }

  // Whether there are no more than these.
  JAX_EP_FN bool all() const { return all_; }
  JAX_EP_FN int count() const { return count_; }
  JAX_EP_FN const Term<Row>* begin() const { return rows_; }
  JAX_EP_FN const Term<Row>* end() const { return rows_ + count_; }

 private:
  static constexpr int kMost = 64;
  Term<Row> rows_[kMost];
  int count_ = 0;
  bool all_;
};

template <int kValues, class In, class Out>
JAX_EP_FN void sum_values(const FewRows<const In>& rows, const FewRows<char>& places, int first) {
  float total[kValues] = {};
  for (const auto& term : rows)
    for (int i = 0; i < kValues; ++i) total[i] += term.weight * to_float(term.row[first + i]);
  Out rounded[kValues];
  from_floats(total, rounded);
  for (const auto& place : places) {  // several are results of as many ranks, not looked at soon
    auto* to = reinterpret_cast<Out*>(place.row) + first;
    if (kValues > 1 && places.count() > 1) {
      stream_out(to, rounded);
    } else {
      for (int i = 0; i < kValues; ++i) to[i] = rounded[i];
    }
  }
}

template <class In, class Out>
JAX_EP_FN void sum_few_rows(const FewRows<const In>& rows, const FewRows<char>& places, int width) {
  constexpr int kValues = 16;  // enough for the vectoriser
  int first = 0;
  for (; first + kValues <= width; first += kValues) sum_values<kValues, In, Out>(rows, places, first);
  for (; first < width; ++first) sum_values<1, In, Out>(rows, places, first);
}

}  // namespace jax_ep
