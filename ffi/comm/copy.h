// Rows of bytes, copied and filled by one coop.
#pragma once

#include <cstdint>
#include <cstring>

#include "comm/platform.h"

namespace jax_ep {

struct alignas(16) Word16 {
  uint64_t low, high;
};

// Whether rows of `bytes` at both addresses can be moved in 16-byte words.
JAX_EP_FN bool in_words(const void* a, const void* b, int64_t bytes) {
  return (reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b) | static_cast<uintptr_t>(bytes)) % 16 == 0;
}

JAX_EP_FN void copy_words(Word16* to, const Word16* from, int64_t words, int64_t first, int step) {
  constexpr int kInFlight = 4;
  int64_t i = first;
  for (; i + (kInFlight - 1) * step < words; i += kInFlight * step) {
    Word16 word[kInFlight];
    for (int j = 0; j < kInFlight; ++j) word[j] = from[i + j * step];
    for (int j = 0; j < kInFlight; ++j) to[i + j * step] = word[j];
  }
  for (; i < words; i += step) to[i] = from[i];
}

JAX_EP_FN void copy_row(const Coop& coop, char* to, const char* from, int64_t bytes) {
  if constexpr (Coop::lanes == 1) {
    memcpy(to, from, bytes);
  } else if (in_words(to, from, bytes)) {
    copy_words(reinterpret_cast<Word16*>(to), reinterpret_cast<const Word16*>(from), bytes / 16, coop.lane,
               Coop::lanes);
  } else {
    for (int64_t i = coop.lane; i < bytes; i += Coop::lanes) to[i] = from[i];
  }
}

// 16-byte words in registers, kWords per lane. Adjacent lanes hold adjacent words.
struct Batch {
  static constexpr int kWords = 8, kBytes = kWords * Coop::lanes * int(sizeof(Word16));
  Word16 word[kWords];

  // All lanes call. Loads kBytes, or `count` words if these are fewer.
  JAX_EP_FN void load(const Coop& coop, const Word16* from, int64_t count) {
    for (int i = 0; i < kWords; ++i)
      if (i * Coop::lanes + coop.lane < count) word[i] = from[i * Coop::lanes + coop.lane];
  }
  JAX_EP_FN void store(const Coop& coop, Word16* to, int64_t count) const {
    for (int i = 0; i < kWords; ++i)
      if (i * Coop::lanes + coop.lane < count) to[i * Coop::lanes + coop.lane] = word[i];
  }
};

// Copies one row to `fanout` addresses, reading it once. All lanes call to(k) together.
template <class To>
JAX_EP_FN void copy_to_each(const Coop& coop, int fanout, To to, const char* from, int64_t bytes) {
  if (Coop::lanes == 1 || !in_words(to(0), from, bytes)) {
    for (int k = 0; k < fanout; ++k) copy_row(coop, to(k), from, bytes);
    return;
  }
  constexpr int kStep = Batch::kWords * Coop::lanes;
  const auto* const source = reinterpret_cast<const Word16*>(from);
  const int64_t count = bytes / 16;
  for (int64_t first = 0; first < count; first += kStep) {
    Batch batch;
    batch.load(coop, source + first, count - first);
    for (int k = 0; k < fanout; ++k) batch.store(coop, reinterpret_cast<Word16*>(to(k)) + first, count - first);
  }
}

// Copies a row, by one lane. `bytes` is a multiple of 4.
JAX_EP_FN void copy_by_lane(char* to, const char* from, int bytes) {
  if (in_words(to, from, bytes)) {
    copy_words(reinterpret_cast<Word16*>(to), reinterpret_cast<const Word16*>(from), bytes / 16, 0, 1);
  } else {
    for (int i = 0; i < bytes / 4; ++i) reinterpret_cast<uint32_t*>(to)[i] = reinterpret_cast<const uint32_t*>(from)[i];
  }
}

// Each lane whose bit is set in `holders` has a short row of a multiple of 4 bytes. The coop copies several rows at
// once, so that it waits for memory once. All lanes call.
JAX_EP_FN void copy_short_rows(const Coop& coop, uint64_t holders, char* to, const char* from, int bytes) {
  constexpr int kAtOnce = 8, kWordBytes = sizeof(Word16);
  if (Coop::lanes == 1 || bytes > Coop::lanes * kWordBytes || coop.ballot(!in_words(to, from, bytes))) {
    if (holders >> coop.lane & 1) copy_by_lane(to, from, bytes);
    return;
  }
  while (holders) {
    Word16 word[kAtOnce], *there[kAtOnce];
    for (int j = 0; j < kAtOnce; ++j) {
      const int lane = holders ? lowest_bit(holders) : 0;
      const auto* source = reinterpret_cast<const Word16*>(coop.from_lane(from, lane)) + coop.lane;
      there[j] = reinterpret_cast<Word16*>(coop.from_lane(to, lane)) + coop.lane;
      if (!holders || coop.lane * kWordBytes >= bytes) there[j] = nullptr;
      if (there[j]) word[j] = *source;
      holders &= holders - 1;
    }
    for (int j = 0; j < kAtOnce; ++j)
      if (there[j]) *there[j] = word[j];
  }
}

// Fills this lane's part of a row.
JAX_EP_FN void fill_row(int lane, char* to, uint8_t byte, int64_t bytes) {
  if constexpr (Coop::lanes == 1) {
    memset(to, byte, bytes);
  } else if (in_words(to, to, bytes)) {
    const uint64_t pattern = byte * 0x0101010101010101ull;
    auto* words = reinterpret_cast<Word16*>(to);
    for (int64_t i = lane; i < bytes / 16; i += Coop::lanes) words[i] = {pattern, pattern};
  } else {
    for (int64_t i = lane; i < bytes; i += Coop::lanes) to[i] = static_cast<char>(byte);
  }
}
JAX_EP_FN void fill_row(const Coop& coop, char* to, uint8_t byte, int64_t bytes) {
  fill_row(coop.lane, to, byte, bytes);
}

}  // namespace jax_ep
