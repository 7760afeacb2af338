// Rows of bytes, copied and filled by one team.
#pragma once

#include <cstdint>
#include <cstring>

#include "comm/platform.h"

namespace jax_ep {

struct alignas(16) Word16 {
  uint64_t low, high;
};

// Whether every row can be moved in 16-byte words.
JAX_EP_FN bool in_words(const void* a, const void* b, int64_t bytes) {
  return (reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b) | static_cast<uintptr_t>(bytes)) % 16 == 0;
}

// Every `step`-th word from `first` on, several in flight.
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

JAX_EP_FN void copy_row(const Team& team, char* to, const char* from, int64_t bytes) {
  if constexpr (Team::lanes == 1) {
    memcpy(to, from, bytes);
  } else if (in_words(to, from, bytes)) {
    copy_words(reinterpret_cast<Word16*>(to), reinterpret_cast<const Word16*>(from), bytes / 16, team.lane,
               Team::lanes);
  } else {
    for (int64_t i = team.lane; i < bytes; i += Team::lanes) to[i] = from[i];
  }
}

// Neighbouring words of all lanes, several a lane.
struct Batch {
  static constexpr int kWords = 8, kBytes = kWords * Team::lanes * int(sizeof(Word16));
  Word16 word[kWords];

  // Those of the `count` from the first on that there are.
  JAX_EP_FN void load(const Team& team, const Word16* from, int64_t count) {
    for (int i = 0; i < kWords; ++i)
      if (i * Team::lanes + team.lane < count) word[i] = from[i * Team::lanes + team.lane];
  }
  JAX_EP_FN void store(const Team& team, Word16* to, int64_t count) const {
    for (int i = 0; i < kWords; ++i)
      if (i * Team::lanes + team.lane < count) to[i * Team::lanes + team.lane] = word[i];
  }
};

// The same bytes to so many places, read once: all lanes ask for to(k) together.
template <class To>
JAX_EP_FN void copy_to_each(const Team& team, int places, To to, const char* from, int64_t bytes) {
  if (Team::lanes == 1 || !in_words(to(0), from, bytes)) {
    for (int k = 0; k < places; ++k) copy_row(team, to(k), from, bytes);
    return;
  }
  constexpr int kStep = Batch::kWords * Team::lanes;
  const auto* const source = reinterpret_cast<const Word16*>(from);
  const int64_t count = bytes / 16;
  for (int64_t first = 0; first < count; first += kStep) {
    Batch batch;
    batch.load(team, source + first, count - first);
    for (int k = 0; k < places; ++k) batch.store(team, reinterpret_cast<Word16*>(to(k)) + first, count - first);
  }
}

// A row of words of 4 bytes at least, by one lane.
JAX_EP_FN void copy_alone(char* to, const char* from, int bytes) {
  if (in_words(to, from, bytes)) {
    copy_words(reinterpret_cast<Word16*>(to), reinterpret_cast<const Word16*>(from), bytes / 16, 0, 1);
  } else {
    for (int i = 0; i < bytes / 4; ++i) reinterpret_cast<uint32_t*>(to)[i] = reinterpret_cast<const uint32_t*>(from)[i];
  }
}

// Each of the lanes in `holders` has a short row of words of 4 bytes at least: all copy them together, several at once,
// so that memory is waited for once.
JAX_EP_FN void copy_short(const Team& team, uint64_t holders, char* to, const char* from, int bytes) {
  constexpr int kAtOnce = 8, kWordBytes = sizeof(Word16);
  if (Team::lanes == 1 || bytes > Team::lanes * kWordBytes || team.ballot(!in_words(to, from, bytes))) {
    if (holders >> team.lane & 1) copy_alone(to, from, bytes);
    return;
  }
  while (holders) {
    Word16 word[kAtOnce], *target[kAtOnce];
    for (int j = 0; j < kAtOnce; ++j) {
      const int lane = holders ? lowest_bit(holders) : 0;
      const auto* source = reinterpret_cast<const Word16*>(team.from_lane(from, lane)) + team.lane;
      target[j] = reinterpret_cast<Word16*>(team.from_lane(to, lane)) + team.lane;
      if (!holders || team.lane * kWordBytes >= bytes) target[j] = nullptr;
      if (target[j]) word[j] = *source;
      holders &= holders - 1;
    }
    for (int j = 0; j < kAtOnce; ++j)
      if (target[j]) *target[j] = word[j];
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
