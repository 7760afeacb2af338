// The layout of tiles in shared memory. A slice of an operand has 64 x 64 16-bit values: 64 rows of 128 bytes. Eight
// rows form an atom. TMA permutes the 16-byte vectors of an atom (the "128-byte swizzle"), and wgmma permutes them
// back.
#pragma once

#include <cstdint>
#include <type_traits>

#include "comm/platform/ptx/mbarrier.h"
#include "gemm/problem.h"

namespace jax_ep::gemm {

constexpr int kSwizzleBytes = 128;  // of a row in shared memory
constexpr int kAtomBytes = 8 * kSwizzleBytes;
constexpr int kSliceBytes = kSlice * kSwizzleBytes;
constexpr int kSlicesA = kBlockM / kSlice;
constexpr int kMultiplyK = 16;  // 16-bit values contracted by one wgmma

constexpr int kConsumerWarps = 8;
constexpr int kWarpgroup = 4;  // warps
constexpr int kConsumers = kConsumerWarps * 32;
constexpr int kThreads = kConsumers + 128;
constexpr int kAuxWarps = 3;  // of the producer's warpgroup, whose first warp is the producer
constexpr int kFirstAuxWarp = kConsumerWarps + 1;
constexpr int kOutRows = 16;  // that a warp stores at once, kSwizzleBytes of each
constexpr int kOutBytes = kOutRows * kSwizzleBytes;

// Shared memory of a CTA on sm_90. Stages get what two buffers for stores per warp, and 1 KiB for barriers, leave. In
// tiles of 192 columns the stages leave room for a third buffer.
constexpr int kSharedBytes = 227 * 1024;
constexpr int kStageMemory = kSharedBytes - kConsumerWarps * 2 * kOutBytes - 1024;

// In a tile of 256 columns each warpgroup has 64 rows (CUTLASS: cooperative). In narrower tiles the warpgroups take
// tiles in turns, so that one stores while the other multiplies (ping-pong).
JAX_EP_CONSTANT_FN bool is_ping_pong(int block_n) { return block_n < 256; }
template <int kBlockN>
constexpr int kRowSlabs = is_ping_pong(kBlockN) ? 2 : 1;  // of 64 rows each, which a warpgroup multiplies

// Which 16 rows of a tile a warp holds in a slab.
template <int kSlabs>
JAX_EP_FN int strip_of(int slab, int warp) {
  return kSlabs == 1 ? warp : slab * kWarpgroup + warp % kWarpgroup;
}

// The warps that store a CTA's tile of this number, and how many tiles each of them has stored by then.
struct Storing {
  int first, warps;
  uint32_t tiles;
};
JAX_EP_FN Storing storing(int block_n, int tile) {
  if (!is_ping_pong(block_n)) return {0, kConsumerWarps, static_cast<uint32_t>(tile) + 1};
  return {tile % 2 * kWarpgroup, kWarpgroup, static_cast<uint32_t>(tile) / 2 + 1};
}

// Whether a tile at an edge multiplies only the 64 rows, or the columns in steps of 64, that it has.
template <int kBlockN>
constexpr bool kHasEdges = kBlockN == 192;

// Buffers through which a warp stores a tile, in pieces of kSwizzleBytes of columns. Pieces take the buffers in turn,
// so the number of pieces must be a multiple of this.
template <int kBlockN>
constexpr int kOutBuffers = kBlockN == 192 ? 3 : 2;

struct Nothing {};

// `Aux`: shared memory of the aux warps. It costs stages.
template <int kBlockN, class Aux = Nothing>
struct Shared {
  static constexpr int kSlices = kSlicesA + kBlockN / kSlice;
  static constexpr int kStageBytes = kSlices * kSliceBytes;
  static constexpr int kAuxBytes = std::is_empty_v<Aux> ? 0 : sizeof(Aux);
  static constexpr int kStages = (kStageMemory - kAuxBytes) / kStageBytes;

  alignas(1024) char stages[kStages][kStageBytes];  // a's slices, then b's
  alignas(1024) char out[kConsumerWarps][kOutBuffers<kBlockN>][kOutBytes];
  uint64_t full[kStages], empty[kStages];
  uint64_t turn[2];                                                // of the warpgroups, to multiply
  uint64_t swap_empty[kConsumerWarps], swap_full[kConsumerWarps];  // the peer's `out`, and this CTA's
  Aux aux;
};

// A tile of gated units of float8 has its rows in two halves. A warpgroup has 64 columns of gate and 64 of up.
constexpr int kGatedWidth = 2 * kSlice, kHalves = kBlockM / kSlice;

// The offset of a 16-byte vector of a row in shared memory.
JAX_EP_FN int swizzled(int smem_row, int vec) { return smem_row * kSwizzleBytes + ((vec ^ (smem_row & 7)) << 4); }

// The descriptor of an operand for wgmma: an address and strides, each in units of 16 bytes and 14 bits wide. In a
// cluster, a shared address has the number of the CTA in its upper bits, which must not reach the strides.
JAX_EP_CONSTANT_FN uint64_t descriptor(uint32_t address, uint64_t leading_bytes, uint64_t stride_bytes) {
  constexpr uint64_t kField = (1 << 14) - 1, kSwizzle128 = 1;
  return kSwizzle128 << 62 | (stride_bytes >> 4 & kField) << 32 | (leading_bytes >> 4 & kField) << 16 |
         (address >> 4 & kField);
}
static_assert(descriptor(0x01000400, 8192, 1024) == descriptor(0x400, 8192, 1024),
              "the number of a CTA must not reach the strides");

// The descriptor of an operand whose first slice starts at `slice`. kMn: the operand is contiguous along m or n, not
// along the contraction. Then the two strides lead to the next slice and the next atom.
template <bool kMn>
JAX_EP_FN uint64_t descriptor_of(const char* slice) {
  return descriptor(ptx::shared_address(slice), kMn ? kSliceBytes : 16, kAtomBytes);
}

template <bool kMn>
constexpr uint64_t kDescriptorStep = (kMn ? kMultiplyK * kSwizzleBytes : kMultiplyK * 2) >> 4;

}  // namespace jax_ep::gemm
