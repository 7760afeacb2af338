// Sums of rows read where they are, for rows of which no stream could bring a batch ahead: by a team of many lanes from
// one dtype to another, or by a team of one.
#pragma once

#include "comm/copy.h"
#include "comm/layout.h"
#include "rows/lineup.h"
#include "rows/numeric.h"
#include "rows/piece.h"

namespace jax_ep {

// `kRows`: of which pieces come at once; of fewer rows, more pieces each.
template <class In, class Out, int kRows = 4>
class DirectSum {
 private:
  static constexpr int kAhead = Team::lanes == 1 ? 1 : kRows, kPieces = Team::lanes == 1 ? 1 : 16 / kRows;
  static constexpr int kValues = Team::lanes * kPieceValues<In>;

 public:
  // Values of a row that are summed at a time.
  static constexpr int kBatch = kPieces * kValues;

  // `words`: all rows are made of 16-byte words.
  JAX_EP_FN DirectSum(const Team& team, bool words) : team_(team), words_(words) {}

  // Puts scale * the sum of row_of(0) .. row_of(rows - 1), in their order and without the null ones, at every place.
  // All lanes see the same rows.
  template <class RowOf, class Places>
  JAX_EP_FN void sum(int rows, RowOf row_of, int width, const Places& places, float scale) const {
    if (Team::lanes > 1 && !words_) return sum_by_value(rows, row_of, width, places, scale);
    for (int first = 0; first < width; first += kBatch) {
      float total[kPieces][kPieceValues<In>] = {};
      for (int i = 0; i < rows; i += kAhead) {
        const In* row[kAhead];
        Piece<In> piece[kAhead][kPieces];
        for (int j = 0; j < kAhead; ++j) row[j] = i + j < rows ? row_of(i + j) : nullptr;
        for (int j = 0; j < kAhead; ++j)
          if (row[j])
            for (int k = 0; k < kPieces; ++k) piece[j][k].load(row[j] + at(first, k), width - at(first, k));
        for (int j = 0; j < kAhead; ++j)
          if (row[j])
            for (int k = 0; k < kPieces; ++k) add(piece[j][k], total[k]);
      }
      for (int k = 0; k < kPieces; ++k) {
        for (float& each : total[k]) each *= scale;
        Piece<Out, kPieceValues<In>> rounded;
        from_floats(total[k], rounded.values);
        for_each_place(places, [&](Out* to) { rounded.store(to + at(first, k), width - at(first, k)); });
      }
    }
  }

 private:
  // Where a lane's piece of a row lies.
  JAX_EP_FN int at(int first, int piece) const { return first + piece * kValues + team_.lane * kPieceValues<In>; }

  // Rows of odd sizes: a value per lane at a time.
  template <class RowOf, class Places>
  JAX_EP_FN void sum_by_value(int rows, RowOf row_of, int width, const Places& places, float scale) const {
    for (int first = 0; first < width; first += Team::lanes) {
      const int at = smaller(first + team_.lane, width - 1);
      float total = 0;
      for (int i = 0; i < rows; ++i)
        if (const In* row = row_of(i)) total += to_float(row[at]);
      for_each_place(places, [&](Out* to) { from_float(scale * total, to + at); });
    }
  }

  template <class Places, class Store>
  JAX_EP_FN void for_each_place(const Places& places, Store store) const {
    auto walk = places.walk();
    for (char* place = walk.next().row; place; place = walk.next().row) store(reinterpret_cast<Out*>(place));
  }

  JAX_EP_FN void add(const Piece<In>& piece, float (&total)[kPieceValues<In>]) const {
    float values[kPieceValues<In>];
    to_floats(piece.values, values);
    for (int j = 0; j < kPieceValues<In>; ++j) total[j] += values[j];
  }

  const Team& team_;
  const bool words_;
};

// By a team of one lane: a few values at a time over all rows, so that they stay in registers.

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
