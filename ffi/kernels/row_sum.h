// Sums of rows in float32: from wherever they are, to one place or several.
#pragma once

#include "device/copy.h"
#include "device/lineup.h"
#include "device/rows.h"
#include "kernels/lone_sum.h"
#include "kernels/piece.h"
#include "kernels/row_stream.h"

namespace jax_ep {

// A batch of a row: what a team sums at a time.
template <class T, int kPieces = kLanePieces>
constexpr int kSumValues = kPieces * Team::lanes * kPieceValues<T>;

// `kPieces`: of a batch, that each lane has.
template <class T, int kPieces = kLanePieces>
class RowSum {
 public:
  // `words`: all rows are made of 16-byte words.
  JAX_EP_FN RowSum(const Team& team, bool words)
      : team_(team), words_(words), stream_(team, kBatchBytes, words, kBatchBytes), writer_(team, kBatchBytes, words) {}

  // Puts the sum of weight * row over the terms, rows of `width` values, in their order, at every place. Where rows
  // come in bulk, they do so while the sum before is made: the last one needs finish().
  template <class Terms, class Places>
  JAX_EP_FN void sum(const Terms& terms, const Places& places, int width) {
    if (!stream_.in_bulk() || !terms.cached() || !places.cached()) {
      finish();
      sum_directly(terms, places, width);
    } else {
      stream_.begin(terms.held(), places.held(), cut(width), SumStaged{this});
    }
  }
  // The same to one place, for which place_of() may wait while rows come.
  template <class Terms, class PlaceOf>
  JAX_EP_FN void sum_to(const Terms& terms, PlaceOf place_of, int width) {
    if (!stream_.in_bulk() || !terms.cached()) {
      finish();
      sum_directly(terms, place_of(), width);
    } else {
      stream_.begin_for(terms.held(), [&] { return place_of().held(); }, cut(width), SumStaged{this});
    }
  }
  JAX_EP_FN void finish() { stream_.finish(SumStaged{this}); }
  // Forgets a sum that was begun.
  JAX_EP_FN void drop() { stream_.drop(); }

  JAX_EP_FN void acquire() { stream_.acquire(); }
  JAX_EP_FN int mark() const { return writer_.mark(); }
  JAX_EP_FN void complete_to(int mark) { writer_.complete_to(mark); }

 private:
  using Total = float[kPieces][kPieceValues<T>];
  static constexpr int kBatchBytes = kSumValues<T, kPieces> * sizeof(T);
  static constexpr int kHalf = kPieces / 2;  // pieces are skipped by halves: a test for each would cost more

  static JAX_EP_FN Cut cut(int width) { return {width * static_cast<int>(sizeof(T)), kBatchBytes}; }

  struct SumStaged {
    RowSum* sum;
    JAX_EP_FN void operator()(const Held<const T>& terms, const Held<char>& places, int row_bytes) const {
      sum->sum_staged(terms, places, row_bytes / static_cast<int>(sizeof(T)));
    }
  };

  JAX_EP_FN void sum_staged(const Held<const T>& terms, const Held<char>& places, int width) {
    for (int first = 0; first < width; first += kSumValues<T, kPieces>) {
      Total total = {};
      const int values = smaller(kSumValues<T, kPieces>, width - first);
      const bool half = values <= kSumValues<T, kPieces> / 2;
      for (int i = 0; i < terms.present(); ++i) {
        add_staged(reinterpret_cast<const T*>(stream_.take()), half, terms.weight(i), total);
        if (i == terms.present() - 1 || stream_.spent()) stream_.release();
      }
      put_staged(places, first, values, half, total);
    }
  }

  template <class Terms, class Places>
  JAX_EP_FN void sum_directly(const Terms& terms, const Places& places, int width) {
    if constexpr (Team::lanes == 1) return sum_alone(terms, places, width);
    if (!words_) return sum_by_value(terms, places, width);
    for (int first = 0; first < width; first += kSumValues<T, kPieces>) {
      Total total = {};
      auto walk = terms.walk();
      for (auto term = walk.next(); term.row; term = walk.next())
        add(term.row + first, width - first, term.weight, total);
      put(places, first, width - first, total);
    }
  }

  // By a team of one lane.
  template <class Terms, class Places>
  JAX_EP_FN void sum_alone(const Terms& terms, const Places& places, int width) const {
    const FewRows<const T> rows(terms);
    const FewRows<char> targets(places);
    if (rows.all() && targets.all())
      sum_few_rows<T, T>(rows, targets, width);
    else
      sum_by_value(terms, places, width);
  }

  // Rows of odd sizes: a value per lane at a time.
  template <class Terms, class Places>
  JAX_EP_FN void sum_by_value(const Terms& terms, const Places& places, int width) const {
    for (int first = 0; first < width; first += Team::lanes) {
      const int at = smaller(first + team_.lane, width - 1);
      float total = 0;
      auto walk = terms.walk();
      for (auto term = walk.next(); term.row; term = walk.next()) total += term.weight * to_float(term.row[at]);
      auto each = places.walk();
      for (char* place = each.next().row; place; place = each.next().row)
        from_float(total, reinterpret_cast<T*>(place) + at);
    }
  }

  JAX_EP_FN int at(int piece) const { return (piece * Team::lanes + team_.lane) * kPieceValues<T>; }

  JAX_EP_FN void add(const Piece<T>& piece, float weight, float (&total)[kPieceValues<T>]) const {
    float values[kPieceValues<T>];
    to_floats(piece.values, values);
    for (int j = 0; j < kPieceValues<T>; ++j) total[j] += weight * values[j];
  }

  // A stage is always whole: what lies behind the end of the row is added too, and never sent.
  JAX_EP_FN void add_staged(const T* batch, bool half, float weight, Total& total) const {
    add_pieces<0>(batch, weight, total);
    if (!half) add_pieces<kHalf>(batch, weight, total);
  }
  template <int kFirst>
  JAX_EP_FN void add_pieces(const T* batch, float weight, Total& total) const {
    Piece<T> piece[kHalf];
    for (int i = 0; i < kHalf; ++i) piece[i].load(batch + at(kFirst + i));
    for (int i = 0; i < kHalf; ++i) add(piece[i], weight, total[kFirst + i]);
  }
  // At most `values` of the row are left.
  JAX_EP_FN void add(const T* batch, int values, float weight, Total& total) const {
    Piece<T> piece[kPieces];
    for (int i = 0; i < kPieces; ++i) piece[i].load(batch + at(i), values - at(i));
    for (int i = 0; i < kPieces; ++i) add(piece[i], weight, total[i]);
  }

  JAX_EP_FN void put_staged(const Held<char>& places, int first, int values, bool half, const Total& total) {
    writer_.put(places, int64_t{first} * sizeof(T),
                smaller(values, kSumValues<T, kPieces>) * static_cast<int>(sizeof(T)), [&](char* to) {
                  store_pieces<0>(total, reinterpret_cast<T*>(to));
                  if (!half) store_pieces<kHalf>(total, reinterpret_cast<T*>(to));
                });
  }
  template <int kFirst>
  JAX_EP_FN void store_pieces(const Total& total, T* to) const {
    for (int i = 0; i < kHalf; ++i) rounded(total[kFirst + i]).store(to + at(kFirst + i));
  }
  template <class Places>
  JAX_EP_FN void put(const Places& places, int first, int values, const Total& total) {
    Piece<T> piece[kPieces];  // rounded once for all places
    for (int i = 0; i < kPieces; ++i) piece[i] = rounded(total[i]);
    writer_.put(places, int64_t{first} * sizeof(T),
                smaller(values, kSumValues<T, kPieces>) * static_cast<int>(sizeof(T)), [&](char* to) {
                  for (int i = 0; i < kPieces; ++i) piece[i].store(reinterpret_cast<T*>(to) + at(i), values - at(i));
                });
  }
  JAX_EP_FN Piece<T> rounded(const float (&total)[kPieceValues<T>]) const {
    Piece<T> piece;
    from_floats(total, piece.values);
    return piece;
  }

  const Team& team_;
  const bool words_;
  RowStream<T, Held<char>> stream_;
  RowWriter writer_;
};

}  // namespace jax_ep
