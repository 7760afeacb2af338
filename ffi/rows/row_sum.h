// Sums of rows in float32: from wherever they are, to one place or several.
#pragma once

#include "comm/copy.h"
#include "rows/direct_sum.h"
#include "rows/lineup.h"
#include "rows/movers.h"
#include "rows/piece.h"
#include "rows/row_stream.h"

namespace jax_ep {

// A batch of a row: what a team sums at a time.
template <class T, int kPieces = kLanePieces>
constexpr int kSumValues = kPieces * Team::lanes * kPieceValues<T>;

// Of a batch, where rows of so many pieces a lane are cut into as few as there can be, all of about the same size.
JAX_EP_CONSTANT_FN int even_pieces(int pieces, int most) {
  const int batches = (pieces + most - 1) / most;
  return batches ? (pieces + batches - 1) / batches : 1;
}

// `kPieces`: of a batch, that each lane has at most.
template <class T, int kPieces = kLanePieces>
class RowSum {
 public:
  // `words`: all rows are made of 16-byte words. `width`: of most rows.
  JAX_EP_FN RowSum(const Team& team, bool words, int width = kSumValues<T, kPieces>)
      : team_(team),
        words_(words),
        batch_(even_pieces((width + kSumValues<T, 1> - 1) / kSumValues<T, 1>, kPieces) * kSumValues<T, 1>),
        stream_(team, stage_bytes(), words, put_stages() * stage_bytes()),
        writer_(team, stage_bytes(), words, put_stages()) {}

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
  static constexpr int kDirectPieces = kPieces < kLanePieces ? kPieces : kLanePieces;
  using Total = float[kDirectPieces][kPieceValues<T>];
  static constexpr int kDirect = kSumValues<T, kDirectPieces>;
  // Long batches leave room for one: reading ahead needs the rest.
  JAX_EP_FN int put_stages() const { return batch_ > kDirect ? 1 : 2; }

  // There is code for batches of so many pieces, half of them, ...: tests inside would cost more.
  template <int kUsed>
  static constexpr int kFewer = kUsed > kLanePieces         ? kLanePieces
                                : kUsed > kDirectPieces / 2 ? (kUsed + 1) / 2
                                                            : kUsed;
  // A stage has room for what that code looks at: what lies behind the end of a row is added too, and never sent.
  template <int kUsed>
  static JAX_EP_FN int staged(int values) {
    if constexpr (kFewer<kUsed> < kUsed)
      if (values <= kSumValues<T, kFewer<kUsed>>) return staged<kFewer<kUsed>>(values);
    return kSumValues<T, kUsed>;
  }
  JAX_EP_FN int stage_bytes() const { return staged<kPieces>(batch_) * static_cast<int>(sizeof(T)); }
  JAX_EP_FN Cut cut(int width) const {
    return {width * static_cast<int>(sizeof(T)), batch_ * static_cast<int>(sizeof(T))};
  }

  struct SumStaged {
    RowSum* sum;
    JAX_EP_FN void operator()(const Held<const T>& terms, const Held<char>& places, int row_bytes) const {
      sum->sum_staged(terms, places, row_bytes / static_cast<int>(sizeof(T)));
    }
  };

  JAX_EP_FN void sum_staged(const Held<const T>& terms, const Held<char>& places, int width) {
    for (int first = 0; first < width; first += batch_)
      sum_batch<kPieces>(terms, places, first, smaller(batch_, width - first));
  }

  template <int kUsed>
  JAX_EP_FN void sum_batch(const Held<const T>& terms, const Held<char>& places, int first, int values) {
    if constexpr (kFewer<kUsed> < kUsed)
      if (values <= kSumValues<T, kFewer<kUsed>>) return sum_batch<kFewer<kUsed>>(terms, places, first, values);
    float total[kUsed][kPieceValues<T>] = {};
    for (auto left = terms.holders(); left;) {
      add_batch(reinterpret_cast<const T*>(stream_.take()), terms.weight_in(lowest_bit(left)), total);
      left &= left - 1;
      if (!left || stream_.spent()) stream_.release();
    }
    writer_.put(places, int64_t{first} * sizeof(T), values * static_cast<int>(sizeof(T)), [&](char* to) {
      for (int i = 0; i < kUsed; ++i) rounded(total[i]).store(reinterpret_cast<T*>(to) + at(i));
    });
  }

  template <int kUsed>
  JAX_EP_FN void add_batch(const T* batch, float weight, float (&total)[kUsed][kPieceValues<T>]) const {
    constexpr int kAtOnce = (kUsed + 1) / 2;  // they must fit into registers
    for (int first = 0; first < kUsed; first += kAtOnce) {
      Piece<T> piece[kAtOnce];
      for (int i = 0; i < kAtOnce && first + i < kUsed; ++i) piece[i].load(batch + at(first + i));
      for (int i = 0; i < kAtOnce && first + i < kUsed; ++i) add(piece[i], weight, total[first + i]);
    }
  }

  template <class Terms, class Places>
  JAX_EP_FN void sum_directly(const Terms& terms, const Places& places, int width) {
    if constexpr (Team::lanes == 1) return sum_alone(terms, places, width);
    if (!words_) return sum_by_value(terms, places, width);
    for (int first = 0; first < width; first += kDirect) {
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

  // At most `values` of the row are left.
  JAX_EP_FN void add(const T* batch, int values, float weight, Total& total) const {
    Piece<T> piece[kDirectPieces];
    for (int i = 0; i < kDirectPieces; ++i) piece[i].load(batch + at(i), values - at(i));
    for (int i = 0; i < kDirectPieces; ++i) add(piece[i], weight, total[i]);
  }

  template <class Places>
  JAX_EP_FN void put(const Places& places, int first, int values, const Total& total) {
    Piece<T> piece[kDirectPieces];  // rounded once for all places
    for (int i = 0; i < kDirectPieces; ++i) piece[i] = rounded(total[i]);
    writer_.put(places, int64_t{first} * sizeof(T), smaller(values, kDirect) * static_cast<int>(sizeof(T)),
                [&](char* to) {
                  for (int i = 0; i < kDirectPieces; ++i)
                    piece[i].store(reinterpret_cast<T*>(to) + at(i), values - at(i));
                });
  }
  JAX_EP_FN Piece<T> rounded(const float (&total)[kPieceValues<T>]) const {
    Piece<T> piece;
    from_floats(total, piece.values);
    return piece;
  }

  const Team& team_;
  const bool words_;
  const int batch_;  // values
  RowStream<T, Held<char>> stream_;
  RowWriter writer_;
};

}  // namespace jax_ep
