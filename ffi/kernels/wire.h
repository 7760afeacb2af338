// Rows on the wire in float8: one scale per block of values, encoded by the sender, decoded where they land.
#pragma once

#include "device/copy.h"
#include "device/layout.h"
#include "kernels/lineup.h"
#include "kernels/piece.h"

namespace jax_ep {

constexpr float kFloat8Max = 448.0f;

// A block is the work of neighbouring lanes, of one where a team has no more.
constexpr int kBlockLanes = Team::lanes == 1 ? 1 : 16;
constexpr int kBlockValues = kScaleBlock / kBlockLanes;
constexpr int kBatch = Team::lanes == 1 ? 1 : 4;  // pieces that a lane has in flight

// The inverse of a block of tiny values must not be infinite: zero times it would be NaN.
JAX_EP_FN float finite(float x) { return x > 3.4028235e38f ? 3.4028235e38f : x; }

// x * (448 / largest) rounds to float8; the scale that undoes it is largest / 448. `row` and `wire` in 16-byte words.
template <class T>
JAX_EP_FN void encode_row(const Team& team, const T* row, int hidden, char* wire) {
  auto* values = reinterpret_cast<Float8E4M3*>(wire);
  auto* scales = reinterpret_cast<float*>(wire + hidden);
  const bool words = in_words(row, wire, 0);
  for (int first = 0; first < hidden; first += kBatch * Team::lanes * kBlockValues) {
    Piece<T, kBlockValues> pieces[kBatch];
    for (int i = 0; i < kBatch; ++i) {
      const int at = first + (i * Team::lanes + team.lane) * kBlockValues;
      pieces[i].load(row + at, at < hidden ? kBlockValues : 0, words);
    }
    for (int i = 0; i < kBatch; ++i) {
      const int at = first + (i * Team::lanes + team.lane) * kBlockValues;
      uint32_t largest = 0;
      for (int j = 0; j < kBlockValues; ++j) {
        const uint32_t magnitude = bit_cast<uint32_t>(to_float(pieces[i].values[j])) & 0x7fffffffu;
        largest = magnitude > largest ? magnitude : largest;  // as integers, NaN is the largest
      }
      const float most = team.max(bit_cast<float>(at < hidden ? largest : 0u), kBlockLanes);
      if (at >= hidden) continue;
      const float inverse = most == 0 ? 1.0f : finite(kFloat8Max / most);
      float scaled[kBlockValues];
      for (int j = 0; j < kBlockValues; ++j) scaled[j] = to_float(pieces[i].values[j]) * inverse;
      Piece<Float8E4M3, kBlockValues> encoded;
      from_floats(scaled, encoded.values);
      encoded.store(values + at, kBlockValues, words);
      if (at % kScaleBlock == 0) scales[at / kScaleBlock] = most == 0 ? 1.0f : most / kFloat8Max;
    }
  }
  team.sync();
}

// Decodes into every row that row_of(0) .. row_of(count - 1) gives.
template <class T, class RowOf>
JAX_EP_FN void decode_row(const Team& team, const char* wire, int hidden, int count, RowOf row_of) {
  const auto* values = reinterpret_cast<const Float8E4M3*>(wire);
  const auto* scales = reinterpret_cast<const float*>(wire + hidden);
  const auto rows = line_up<T>(team, count, [&](int k) { return Term<T>{row_of(k), 1.0f}; });
  for (int first = 0; first < hidden; first += kBatch * Team::lanes * kBlockValues) {
    Piece<T, kBlockValues> decoded[kBatch];
    for (int i = 0; i < kBatch; ++i) {
      const int at = first + (i * Team::lanes + team.lane) * kBlockValues;
      if (at >= hidden) continue;
      Piece<Float8E4M3, kBlockValues> piece;
      piece.load(values + at, kBlockValues, true);
      const float scale = scales[at / kScaleBlock];
      float scaled[kBlockValues];
      to_floats(piece.values, scaled);
      for (int j = 0; j < kBlockValues; ++j) scaled[j] *= scale;
      from_floats(scaled, decoded[i].values);
    }
    auto walk = rows.walk();
    for (T* row = walk.next().row; row; row = walk.next().row)
      for (int i = 0; i < kBatch; ++i) {
        const int at = first + (i * Team::lanes + team.lane) * kBlockValues;
        if (at < hidden) decoded[i].store(row + at, kBlockValues, in_words(row, row, 0));
      }
  }
  team.sync();
}

}  // namespace jax_ep
