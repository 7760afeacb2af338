// The results of an op, and what they hold where it delivers nothing.
#pragma once

#include "comm/copy.h"
#include "comm/platform.h"

namespace jax_ep {

// What the bytes of a result become when it is not delivered: NaN, or -1 in integers; 0 for sizes, which other kernels
// trust; and for targets, something less than -1, by which combine knows that its tokens never left.
enum class Undelivered : uint8_t { nan = 0xff, size = 0, target = 0x80 };

// A result of an op.
struct Buffer {
  void* data;
  int64_t bytes;
  Undelivered undelivered = Undelivered::nan;
};

// Fills the share of a buffer that belongs to one of several coops. It is told its lane alone: to hand over a whole
// coop would cost a kernel registers.
JAX_EP_COLD_FN void fill_share(int lane, Buffer buffer, Part part) {
  constexpr int64_t kChunk = 1 << 16;
  for (int64_t begin = part.index * kChunk; begin < buffer.bytes; begin += part.count * kChunk) {
    const int64_t left = buffer.bytes - begin;
    fill_row(lane, static_cast<char*>(buffer.data) + begin, static_cast<uint8_t>(buffer.undelivered),
             left < kChunk ? left : kChunk);
  }
}

}  // namespace jax_ep
