// Sums of rows in float32: from wherever they are, to wherever they are wanted.
#pragma once

#include <type_traits>

#include "device/copy.h"
#include "device/lineup.h"
#include "device/rows.h"
#include "kernels/piece.h"

namespace jax_ep {

// A batch of a row: what a team sums at a time.
template <class T>
constexpr int kSumValues = kLanePieces * Team::lanes * kPieceValues<T>;

// Results are rows of T.
template <class T>
class RowSum {
 public:
  // `words`: all rows are made of 16-byte words.
  JAX_EP_FN RowSum(const Team& team, int hidden, bool words)
      : team_(team),
        hidden_(hidden),
        words_(words),
        reader_(team, kSumValues<T> * sizeof(T), words),
        writer_(team, kSumValues<T> * sizeof(T), words) {
    static_assert(Team::lanes == 1 || kSumValues<T> * sizeof(T) == kSumValues<float> * sizeof(float));
  }

  // out = the sum of weight * row over the terms, in their order.
  template <class Terms>
  JAX_EP_FN void sum(const Terms& terms, T* out) {
    const auto place = line_up<char>(team_, 1, [&](int) { return Term<char>{reinterpret_cast<char*>(out), 1.0f}; });
    sum(terms, place, 1.0f);
  }

  // The same, scaled and to several places.
  template <class Terms, class Places>
  JAX_EP_FN void sum(const Terms& terms, const Places& places, float scale) {
    if (reader_.in_bulk() && terms.cached() && terms.present() <= reader_.depth())
      sum_ahead(terms, places, scale);
    else
      sum_directly(terms, places, scale);
  }

  // Values [first, first + kSumValues<T>) of out = the sum of row_of(0) .. row_of(count - 1), in their order and in
  // float32. Made for many rows; out is of this rank.
  template <class RowOf>
  JAX_EP_FN void sum_many(int count, RowOf row_of, int first, float* out) {
    const int group = larger(1, smaller(reader_.depth() / 2, Team::lanes));
    const auto ask = [&](int begin) {
      if (begin >= count) return;
      const int many = smaller(group, count - begin);
      reader_.ask(many, row_of(begin + smaller(team_.lane, many - 1)) + first,
                  values<T>(first) * static_cast<int>(sizeof(T)));
    };
    Total<T> total = {};
    if (reader_.in_bulk()) ask(0);
    for (int begin = 0; begin < count; begin += group) {
      ask(reader_.in_bulk() ? begin + group : begin);
      for (int i = begin; i < smaller(begin + group, count); ++i)
        add(reinterpret_cast<const T*>(reader_.take()), first, 1.0f, total);
      reader_.release();
    }
    for (int i = 0; i < kLanePieces; ++i) {
      Piece<float, kPieceValues<T>> piece;
      for (int j = 0; j < kPieceValues<T>; ++j) piece.values[j] = total[i][j];
      piece.store(out + first + at<T>(i), left<T>(i, first), words_);
    }
  }

  JAX_EP_FN void acquire() { reader_.acquire(); }
  JAX_EP_FN int mark() const { return writer_.mark(); }
  JAX_EP_FN void complete_to(int mark) { writer_.complete_to(mark); }

 private:
  template <class In>
  using Total = float[kLanePieces][kPieceValues<In>];
  template <class Terms>
  using InputOf = std::remove_const_t<typename Terms::Element>;

  // The batches of all terms come while earlier ones are summed.
  template <class Terms, class Places>
  JAX_EP_FN void sum_ahead(const Terms& terms, const Places& places, float scale) {
    using In = InputOf<Terms>;
    const int present = terms.present(), ahead = present ? reader_.depth() / present : 0;
    const auto ask = [&](int first) {
      if (first < hidden_)
        reader_.ask(present, terms.mine().row + first, values<In>(first) * static_cast<int>(sizeof(In)));
    };
    for (int i = 0; i < ahead; ++i) ask(i * kSumValues<In>);
    for (int first = 0; first < hidden_; first += kSumValues<In>) {
      Total<In> total = {};
      for (int i = 0; i < present; ++i) {
        const In* batch = reinterpret_cast<const In*>(reader_.take());
        add(batch, first, terms.weight(i), total);
      }
      reader_.release();
      ask(first + ahead * kSumValues<In>);
      put<In>(places, first, total, scale);
    }
  }

  template <class Terms, class Places>
  JAX_EP_FN void sum_directly(const Terms& terms, const Places& places, float scale) {
    using In = InputOf<Terms>;
    for (int first = 0; first < hidden_; first += kSumValues<In>) {
      Total<In> total = {};
      auto walk = terms.walk();
      for (auto term = walk.next(); term.row; term = walk.next()) add(term.row + first, first, term.weight, total);
      put<In>(places, first, total, scale);
    }
  }

  template <class In>
  JAX_EP_FN int values(int first) const {
    return smaller(kSumValues<In>, hidden_ - first);
  }
  template <class In>
  JAX_EP_FN int at(int piece) const {
    return (piece * Team::lanes + team_.lane) * kPieceValues<In>;
  }
  template <class In>
  JAX_EP_FN int left(int piece, int first) const {
    return smaller(kPieceValues<In>, hidden_ - first - at<In>(piece));
  }
  template <class In>
  JAX_EP_FN bool whole(int first) const {
    return words_ && first + kSumValues<In> <= hidden_;
  }

  template <class In>
  JAX_EP_FN void add(const In* batch, int first, float weight, Total<In>& total) const {
    Piece<In> pieces[kLanePieces];
    if (whole<In>(first))
      for (int i = 0; i < kLanePieces; ++i) pieces[i].load(batch + at<In>(i));
    else
      for (int i = 0; i < kLanePieces; ++i) pieces[i].load(batch + at<In>(i), left<In>(i, first), words_);
    for (int i = 0; i < kLanePieces; ++i) {
      float values[kPieceValues<In>];
      to_floats(pieces[i].values, values);
      for (int j = 0; j < kPieceValues<In>; ++j) total[i][j] += weight * values[j];
    }
  }

  template <class In, class Places>
  JAX_EP_FN void put(const Places& places, int first, Total<In>& total, float scale) {
    Piece<T, kPieceValues<In>> pieces[kLanePieces];
    for (int i = 0; i < kLanePieces; ++i) {
      for (int j = 0; j < kPieceValues<In>; ++j) total[i][j] *= scale;
      from_floats(total[i], pieces[i].values);
    }
    const int bytes = values<In>(first) * static_cast<int>(sizeof(T));
    writer_.put(places, int64_t{first} * static_cast<int>(sizeof(T)), bytes, [&](char* to) {
      for (int i = 0; i < kLanePieces; ++i)
        if (whole<In>(first))
          pieces[i].store(reinterpret_cast<T*>(to) + at<In>(i));
        else
          pieces[i].store(reinterpret_cast<T*>(to) + at<In>(i), left<In>(i, first), words_);
    });
  }

  const Team& team_;
  const int hidden_;
  const bool words_;
  RowReader reader_;
  RowWriter writer_;
};

}  // namespace jax_ep
