// Sums rows where they lie, without a stream that brings batches ahead. DirectSum is for coops of many lanes, from one
// dtype to another. sum_few_rows is for a coop of one lane.
#pragma once

#include "comm/copy.h"
#include "comm/integers.h"
#include "rows/numeric.h"
#include "rows/pack.h"
#include "rows/terms.h"

namespace jax_ep {

// Rows of odd sizes: a value per lane at a time. total_at(i) is the sum of value i over the rows.
template <class Out, class Sinks, class TotalAt>
JAX_EP_FN void sum_by_value(const Coop& coop, const Sinks& sinks, int width, TotalAt total_at) {
  for (int first = 0; first < width; first += Coop::lanes) {
    const int at = smaller(first + coop.lane, width - 1);
    const float total = total_at(at);
    for_each_term(sinks,
                  [&](const WeightedRow<char>& sink) { from_float(total, reinterpret_cast<Out*>(sink.row) + at); });
  }
}

// `kRows`: how many rows have packs in flight at once. A lane has 16 packs in flight in all, so fewer rows mean more
// packs of each row. Tuned with `bench sparse`.
template <class In, class Out, int kRows = 4>
class DirectSum {
 private:
  static constexpr int kAhead = Coop::lanes == 1 ? 1 : kRows, kPacks = Coop::lanes == 1 ? 1 : 16 / kRows;
  static constexpr int kValues = Coop::lanes * kPackValues<In>;

 public:
  // Values of a row that are summed at a time.
  static constexpr int kBatch = kPacks * kValues;

  // `words`: all rows are made of 16-byte words.
  JAX_EP_FN DirectSum(const Coop& coop, bool words) : coop_(coop), words_(words) {}

  // Puts scale * (row_of(0) + ... + row_of(rows - 1)) into every sink, added in this order without the null rows. All
  // lanes see the same rows.
  template <class RowOf, class Sinks>
  JAX_EP_FN void sum(int rows, RowOf row_of, int width, const Sinks& sinks, float scale) const {
    if (Coop::lanes > 1 && !words_) {
      return sum_by_value<Out>(coop_, sinks, width, [&](int at) {
        float total = 0;
        for (int i = 0; i < rows; ++i)
          if (const In* row = row_of(i)) total += to_float(row[at]);
        return scale * total;
      });
    }
    for (int first = 0; first < width; first += kBatch) {
      float total[kPacks][kPackValues<In>] = {};
      for (int i = 0; i < rows; i += kAhead) {
        const In* row[kAhead];
        Pack<In> pack[kAhead][kPacks];
        for (int j = 0; j < kAhead; ++j) row[j] = i + j < rows ? row_of(i + j) : nullptr;
        for (int j = 0; j < kAhead; ++j)
          if (row[j])
            for (int k = 0; k < kPacks; ++k) pack[j][k].load(row[j] + at(first, k), width - at(first, k));
        for (int j = 0; j < kAhead; ++j)
          if (row[j])
            for (int k = 0; k < kPacks; ++k) add(pack[j][k], total[k]);
      }
      for (int k = 0; k < kPacks; ++k) {
        for (float& each : total[k]) each *= scale;
        Pack<Out, kPackValues<In>> rounded;
        from_floats(total[k], rounded.values);
        for_each_term(sinks, [&](const WeightedRow<char>& sink) {
          rounded.store(reinterpret_cast<Out*>(sink.row) + at(first, k), width - at(first, k));
        });
      }
    }
  }

 private:
  JAX_EP_FN int at(int first, int pack) const { return first + pack * kValues + coop_.lane * kPackValues<In>; }

  JAX_EP_FN void add(const Pack<In>& pack, float (&total)[kPackValues<In>]) const {
    float values[kPackValues<In>];
    to_floats(pack.values, values);
    for (int j = 0; j < kPackValues<In>; ++j) total[j] += values[j];
  }

  const Coop& coop_;
  const bool words_;
};

// Terms, looked up once. A coop of one lane sums a few values at a time over all rows, so that sums stay in registers.
template <class Row>
class FewRows {
 public:
  template <class Rows>
  JAX_EP_FN explicit FewRows(const Rows& rows) {
    auto walk = rows.walk();
    WeightedRow<Row> next = walk.next();
    for (; next.row && count_ < kMax; next = walk.next()) rows_[count_++] = next;
    all_ = !next.row;
  }

  JAX_EP_FN bool all() const { return all_; }
  JAX_EP_FN int count() const { return count_; }
  JAX_EP_FN const WeightedRow<Row>* begin() const { return rows_; }
  JAX_EP_FN const WeightedRow<Row>* end() const { return rows_ + count_; }

 private:
  static constexpr int kMax = 64;
  WeightedRow<Row> rows_[kMax];
  int count_ = 0;
  bool all_;
};

template <int kValues, class In, class Out>
JAX_EP_FN void sum_values(const FewRows<const In>& rows, const FewRows<char>& sinks, int first) {
  float total[kValues] = {};
  for (const auto& term : rows)
    for (int i = 0; i < kValues; ++i) total[i] += term.weight * to_float(term.row[first + i]);
  Out rounded[kValues];
  from_floats(total, rounded);
  for (const auto& sink : sinks) {  // several sinks are results of several ranks, and nobody reads them soon
    auto* to = reinterpret_cast<Out*>(sink.row) + first;
    if (kValues > 1 && sinks.count() > 1) {
      stream_out(to, rounded);
    } else {
      for (int i = 0; i < kValues; ++i) to[i] = rounded[i];
    }
  }
}

template <class In, class Out>
JAX_EP_FN void sum_few_rows(const FewRows<const In>& rows, const FewRows<char>& sinks, int width) {
  constexpr int kValues = 16;  // enough for the vectoriser
  int first = 0;
  for (; first + kValues <= width; first += kValues) sum_values<kValues, In, Out>(rows, sinks, first);
  for (; first < width; ++first) sum_values<1, In, Out>(rows, sinks, first);
}

}  // namespace jax_ep
