// The results of an op, and the bytes that fill them if the op delivers nothing.
#pragma once

#include "comm/copy.h"
#include "comm/platform.h"

namespace jax_ep {

// The byte that fills an undelivered result. nan: NaN, or -1 in integers. size: 0, because other kernels trust sizes.
// index: below -1, because -1 means no row.
enum class Undelivered : uint8_t { nan = 0xff, size = 0, index = 0x80 };

// Whether an index comes from an op that delivered nothing. Ops that take such an index return NaN, not zero.
JAX_EP_CONSTANT_FN bool is_undelivered(int32_t index) { return index < -1; }

struct Buffer {
  void* data;
  int64_t bytes;
  Undelivered undelivered = Undelivered::nan;
};

// Fills one coop's part of a buffer. Takes the lane, because passing the coop would cost the caller registers.
JAX_EP_COLD_FN void fill_part(int lane, Buffer buffer, Part part) {
  constexpr int64_t kAtOnce = 1 << 16;
  for (int64_t begin = part.index * kAtOnce; begin < buffer.bytes; begin += part.count * kAtOnce) {
    const int64_t left = buffer.bytes - begin;
    fill_row(lane, static_cast<char*>(buffer.data) + begin, static_cast<uint8_t>(buffer.undelivered),
             left < kAtOnce ? left : kAtOnce);
  }
}

}  // namespace jax_ep
