// Sums of rows in float32: from wherever they are, to one place.
#pragma once

#include "device/copy.h"
#include "device/lineup.h"
#include "device/rows.h"
#include "kernels/piece.h"

namespace jax_ep {

// A batch of a row: what a team sums at a time.
template <class T>
constexpr int kSumValues = kLanePieces * Team::lanes * kPieceValues<T>;

template <class T>
class RowSum {
 public:
  // `words`: all rows are made of 16-byte words.
  JAX_EP_FN RowSum(const Team& team, int hidden, bool words)
      : team_(team),
        hidden_(hidden),
        words_(words),
        reader_(team, kSumValues<T> * sizeof(T), words),
        writer_(team, kSumValues<T> * sizeof(T), words) {}

  // From now on rows have so many values.
  JAX_EP_FN void resize(int hidden) { hidden_ = hidden; }

  // out = the sum of weight * row over the terms, in their order.
  template <class Terms>
  JAX_EP_FN void sum(const Terms& terms, T* out) {
    const auto place = line_up<char>(team_, 1, [&](int) { return Term<char>{reinterpret_cast<char*>(out), 1.0f}; });
    sum(terms, place);
  }

  // The same to several places.
  template <class Terms, class Places>
  JAX_EP_FN void sum(const Terms& terms, const Places& places) {
    if (reader_.in_bulk() && terms.cached() && terms.present() <= reader_.depth())
      sum_ahead(terms, places);
    else
      sum_directly(terms, places);
  }

  JAX_EP_FN void acquire() { reader_.acquire(); }
  JAX_EP_FN int mark() const { return writer_.mark(); }
  JAX_EP_FN void complete_to(int mark) { writer_.complete_to(mark); }

 private:
  using Total = float[kLanePieces][kPieceValues<T>];

  // The batches of all terms come while earlier ones are summed.
  template <class Terms, class Place>
  JAX_EP_FN void sum_ahead(const Terms& terms, const Place& place) {
    const int present = terms.present(), ahead = present ? reader_.depth() / present : 0;
    const auto ask = [&](int first) {
      if (first < hidden_) reader_.ask(present, terms.mine().row + first, values(first) * static_cast<int>(sizeof(T)));
    };
    for (int i = 0; i < ahead; ++i) ask(i * kSumValues<T>);
    for (int first = 0; first < hidden_; first += kSumValues<T>) {
      Total total = {};
      for (int i = 0; i < present; ++i) {
        const T* batch = reinterpret_cast<const T*>(reader_.take());
        add(batch, first, terms.weight(i), total);
      }
      reader_.release();
      ask(first + ahead * kSumValues<T>);
      put(place, first, total);
    }
  }

  template <class Terms, class Place>
  JAX_EP_FN void sum_directly(const Terms& terms, const Place& place) {
    for (int first = 0; first < hidden_; first += kSumValues<T>) {
      Total total = {};
      auto walk = terms.walk();
      for (auto term = walk.next(); term.row; term = walk.next()) add(term.row + first, first, term.weight, total);
      put(place, first, total);
    }
  }

  JAX_EP_FN int values(int first) const { return smaller(kSumValues<T>, hidden_ - first); }
  JAX_EP_FN int at(int piece) const { return (piece * Team::lanes + team_.lane) * kPieceValues<T>; }
  JAX_EP_FN int count(int piece, int first) const { return smaller(kPieceValues<T>, hidden_ - first - at(piece)); }
  JAX_EP_FN bool whole(int first) const { return words_ && first + kSumValues<T> <= hidden_; }

  JAX_EP_FN void add(const T* batch, int first, float weight, Total& total) const {
    Piece<T> pieces[kLanePieces];
    if (whole(first))
      for (int i = 0; i < kLanePieces; ++i) pieces[i].load(batch + at(i));
    else
      for (int i = 0; i < kLanePieces; ++i) pieces[i].load(batch + at(i), count(i, first), words_);
    for (int i = 0; i < kLanePieces; ++i) {
      float values[kPieceValues<T>];
      to_floats(pieces[i].values, values);
      for (int j = 0; j < kPieceValues<T>; ++j) total[i][j] += weight * values[j];
    }
  }

  template <class Place>
  JAX_EP_FN void put(const Place& place, int first, const Total& total) {
    writer_.put(place, int64_t{first} * sizeof(T), values(first) * static_cast<int>(sizeof(T)), [&](char* to) {
      for (int i = 0; i < kLanePieces; ++i) {
        Piece<T> piece;
        from_floats(total[i], piece.values);
        if (whole(first))
          piece.store(reinterpret_cast<T*>(to) + at(i));
        else
          piece.store(reinterpret_cast<T*>(to) + at(i), count(i, first), words_);
      }
    });
  }

  const Team& team_;
  int hidden_;
  const bool words_;
  RowReader reader_;
  RowWriter writer_;
};

}  // namespace jax_ep
