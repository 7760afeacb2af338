// Rows of bytes, copied and filled by one team.
#pragma once

#include <cstdint>
#include <cstring>

#include "device/platform.h"

namespace jax_ep {

struct alignas(16) Word16 {
  uint64_t low, high;
};

// Whether every row can be moved in 16-byte words.
JAX_EP_FN bool in_words(const void* a, const void* b, int64_t bytes) {
  return (reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b) | static_cast<uintptr_t>(bytes)) % 16 == 0;
}

JAX_EP_FN void copy_row(const Team& team, char* to, const char* from, int64_t bytes) {
  if constexpr (Team::lanes == 1) {
    memcpy(to, from, bytes);
  } else if (in_words(to, from, bytes)) {
    constexpr int kInFlight = 4;
    const auto* source = reinterpret_cast<const Word16*>(from);
    auto* target = reinterpret_cast<Word16*>(to);
    const int64_t words = bytes / 16;
    int64_t i = team.lane;
    for (; i + (kInFlight - 1) * Team::lanes < words; i += kInFlight * Team::lanes) {
      Word16 word[kInFlight];
      for (int j = 0; j < kInFlight; ++j) word[j] = source[i + j * Team::lanes];
      for (int j = 0; j < kInFlight; ++j) target[i + j * Team::lanes] = word[j];
    }
    for (; i < words; i += Team::lanes) target[i] = source[i];
  } else {
    for (int64_t i = team.lane; i < bytes; i += Team::lanes) to[i] = from[i];
  }
}

JAX_EP_FN void fill_row(const Team& team, char* to, uint8_t byte, int64_t bytes) {
  if constexpr (Team::lanes == 1) {
    memset(to, byte, bytes);
  } else if (in_words(to, to, bytes)) {
    const uint64_t pattern = byte * 0x0101010101010101ull;
    auto* target = reinterpret_cast<Word16*>(to);
    for (int64_t i = team.lane; i < bytes / 16; i += Team::lanes) target[i] = {pattern, pattern};
  } else {
    for (int64_t i = team.lane; i < bytes; i += Team::lanes) to[i] = static_cast<char>(byte);
  }
}

}  // namespace jax_ep
