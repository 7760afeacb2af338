// Rows on the wire in float8: one scale per block of values, encoded by the sender, decoded where they land.
#pragma once

#include "device/layout.h"
#include "device/numeric.h"

namespace jax_ep {

constexpr float kFloat8Max = 448.0f;

template <class T>
JAX_EP_FN void encode_row(const Team& team, const T* row, int hidden, char* wire) {
  auto* values = reinterpret_cast<Float8E4M3*>(wire);
  auto* scales = reinterpret_cast<float*>(wire + hidden);
  for (int block = 0; block < hidden / kScaleBlock; ++block) {
    const T* from = row + block * kScaleBlock;
    float largest = 0;
    for (int i = team.lane; i < kScaleBlock; i += Team::lanes) {
      const uint32_t magnitude = bit_cast<uint32_t>(to_float(from[i])) & 0x7fffffffu;
      const uint32_t so_far = bit_cast<uint32_t>(largest);
      largest = bit_cast<float>(magnitude > so_far ? magnitude : so_far);  // as integers, NaN is the largest
    }
    largest = team.max(largest);
    const float scale = largest == 0 ? 1.0f : largest / kFloat8Max;
    for (int i = team.lane; i < kScaleBlock; i += Team::lanes)
      from_float(to_float(from[i]) / scale, &values[block * kScaleBlock + i]);
    if (team.lane == 0) scales[block] = scale;
  }
  team.sync();
}

template <class T>
JAX_EP_FN void decode_row(const Team& team, const char* wire, int hidden, T* row) {
  const auto* values = reinterpret_cast<const Float8E4M3*>(wire);
  const auto* scales = reinterpret_cast<const float*>(wire + hidden);
  for (int block = 0; block < hidden / kScaleBlock; ++block) {
    const float scale = scales[block];
    for (int i = team.lane; i < kScaleBlock; i += Team::lanes) {
      const int at = block * kScaleBlock + i;
      from_float(to_float(values[at]) * scale, &row[at]);
    }
  }
  team.sync();
}

}  // namespace jax_ep
