// Products in tiles of fixed height, of 16-bit operands.
#pragma once

#include "gemm/pipeline.h"
#include "gemm/ptx/wgmma.h"
#include "gemm/schedule.h"

namespace jax_ep::gemm {

template <int kValue>
using Constant = std::integral_constant<int, kValue>;

// A group's contraction may end inside a stage, where rows of the next group follow. Zeroes these, from `valid` to the
// end of the last multiply.
template <int kBlockN>
JAX_EP_FN void zero_rows(char* stage, int valid) {
  constexpr int kThreads = kConsumers / kRowSlabs<kBlockN>, kVecs = kSwizzleBytes / 16;
  static_assert((kMultiplyK - 1) * kVecs <= kThreads, "a thread zeroes one vector of a slice");
  const int thread = threadIdx.x % kThreads, vecs = (ceil_div(valid, kMultiplyK) * kMultiplyK - valid) * kVecs;
  if (vecs == 0) return;
  char* const first = stage + valid * kSwizzleBytes + thread * 16;
#pragma unroll
  for (int slice = 0; slice < Shared<kBlockN>::kSlices; ++slice)
    if (thread < vecs) *reinterpret_cast<uint4*>(first + slice * kSliceBytes) = uint4{};
  ptx::shared_proxy_fence();
  ptx::sync_some(1 + threadIdx.x / kThreads, kThreads);
}

// One step of a stage, kMultiplyK of the contraction: d += a x b, or d = a x b in the first.
template <class In, int kWidth, int kSlabs, bool kMnA, bool kMnB, int kAll, int kCount>
JAX_EP_FN void multiply_step(float (&d)[kAll][kCount], uint64_t a, uint64_t b, int step, bool is_first) {
#pragma unroll
  for (int slab = 0; slab < kSlabs; ++slab)
    multiply<In, kWidth, kMnA, kMnB>(d[slab], a + slab * (kSliceBytes >> 4) + step * kDescriptorStep<kMnA>,
                                     b + step * kDescriptorStep<kMnB>, !is_first);
}

// Multiplies the whole stages in [begin, end), and releases all but the last: d = a x b in the first kWidth columns of
// the first kSlabs slabs. A stage has kBlocks blocks, with one slice of b each. Returns the stage that wgmma may still
// read, or -1.
template <class In, int kWidth, int kSlabs, bool kMnA, bool kMnB, int kSlicesOfA = kSlicesA, int kBlocks = 1,
          class Memory, int kAll, int kCount>
JAX_EP_FN int multiply_stages(float (&d)[kAll][kCount], Memory& shared, int begin, int end,
                              PipelineState<Memory::kStages>& at, int first_slice, int lane) {
  int running = -1;
  constexpr int kStepsOfBlock = kBlockK / kMultiplyK, kBlock = (kSlicesOfA + 1) * kSliceBytes >> 4;
  for (int k = begin; k < end; k += kBlocks * kBlockK, at.advance()) {
    const char* const stage = shared.stages[at.stage];
    wait_barrier(&shared.full[at.stage], at.parity, "a full stage");
    const uint64_t a = descriptor_of<kMnA>(stage + first_slice * kSliceBytes);
    const uint64_t b = descriptor_of<kMnB>(stage + kSlicesOfA * kSliceBytes);
    begin_multiplies();
#pragma unroll
    for (int i = 0; i < kBlocks * kStepsOfBlock; ++i)
      multiply_step<In, kWidth, kSlabs, kMnA, kMnB>(d, a + i / kStepsOfBlock * kBlock, b + i / kStepsOfBlock * kBlock,
                                                    i % kStepsOfBlock, k == begin && i == 0);
    commit_multiplies();
    wait_multiplies<1>();
    if (running >= 0) consumer_release(&shared.empty[running], lane);
    running = at.stage;
  }
  return running;
}

// The last stage of a group, if the contraction ends inside it: only the needed steps, all columns.
template <class In, int kBlockN, class Memory>
JAX_EP_FN int multiply_rest(float (&d)[kRowSlabs<kBlockN>][kBlockN / 2], Memory& shared, int valid, bool is_first,
                            PipelineState<Memory::kStages>& at, int first_slice) {
  char* const stage = shared.stages[at.stage];
  wait_barrier(&shared.full[at.stage], at.parity, "a full stage");
  zero_rows<kBlockN>(stage, valid);
  const uint64_t a = descriptor_of<true>(stage + first_slice * kSliceBytes);
  const uint64_t b = descriptor_of<true>(stage + kSlicesA * kSliceBytes);
  int step = 0;
#pragma unroll 1
  do {
    begin_multiplies();
    multiply_step<In, kBlockN, kRowSlabs<kBlockN>, true, true>(d, a, b, step, is_first && step == 0);
    commit_multiplies();
  } while (++step * kMultiplyK < valid);
  const int last = at.stage;
  at.advance();
  return last;
}

// Tiles of fixed height: each warp computes their list.
template <int kBlockN>
struct FixedTiles {
  using Tile = gemm::Tile;
  template <class HookMemory>
  using Memory = Shared<kBlockN, HookMemory>;
  struct NoFeeder {
    JAX_EP_FN static bool feed() { return false; }
  };

  JAX_EP_FN static void open(auto& /*shared*/, int /*readers*/) {}
  JAX_EP_FN static Schedule list(auto& /*shared*/, const Problem& problem, Part cta) {
    return Schedule(problem, kBlockN, cta);
  }
  JAX_EP_FN static NoFeeder feeder(auto& /*shared*/, const auto& /*source*/, const Problem&) { return {}; }
  JAX_EP_FN static void close() {}
};

// The multiply step (kernel.h) of 16-bit operands in every storage order. kMnA, kMnB: lhs is contiguous along m, rhs
// along n, instead of along k.
template <class In, int kBlockN, bool kMnA, bool kMnB>
struct MultiplyTiles {
  using Tiles = FixedTiles<kBlockN>;
  using Accumulators = float[kRowSlabs<kBlockN>][kBlockN / 2];
  static constexpr bool kPingPong = is_ping_pong(kBlockN);
  static constexpr int kRegisters = kRowSlabs<kBlockN> * kBlockN / 2;

  JAX_EP_FN static bool has_work(const auto& /*source*/, const Problem& problem, const Tile& tile, int warpgroup) {
    const int first_row = tile.row + (kPingPong ? 0 : warpgroup * kSlice);
    const bool wanted = first_row < tile.row_end && tile.col < problem.n;
    // Both warpgroups must reach the barrier in zero_rows, so one without rows multiplies, too.
    const bool meets = !kPingPong && problem.grouping == Grouping::k_grouped;
    return wanted || meets;
  }

  // d = lhs x rhs. At edges only the tile's own columns and rows, rounded up to 64.
  JAX_EP_FN static void accumulate(Accumulators& d, auto& shared, const auto& /*source*/, const Problem& problem,
                                   const Tile& tile, auto& at, int warp, int lane) {
    const int warpgroup = warp / kWarpgroup;
    if (tile.k_begin >= tile.k_end) {
      set_zero(d);
      return pass_turn<kPingPong>(shared, warpgroup, lane);
    }
    leave_undefined(d);
    const int first_slice = kPingPong ? 0 : warpgroup, begin = tile.k_begin;
    const bool ends_inside = kMnA && kMnB && problem.grouping == Grouping::k_grouped;
    const int end = ends_inside ? tile.k_end - (tile.k_end - begin) % kBlockK : tile.k_end;
    const auto stages = [&](auto width, auto slabs) {
      return multiply_stages<In, decltype(width)::value, decltype(slabs)::value, kMnA, kMnB>(d, shared, begin, end, at,
                                                                                             first_slice, lane);
    };
    constexpr Constant<kBlockN> kAllColumns;
    constexpr Constant<kRowSlabs<kBlockN>> kAllSlabs;
    int running, rest = -1;  // stages that wgmma may still read
    if constexpr (kHasEdges<kBlockN>) {
      const int columns = problem.n - tile.col;
      if (tile.row_end - tile.row <= kSlice)
        running = stages(kAllColumns, Constant<1>{});
      else if (columns <= 64)
        running = stages(Constant<64>{}, kAllSlabs);
      else if (columns <= 128)
        running = stages(Constant<128>{}, kAllSlabs);
      else
        running = stages(kAllColumns, kAllSlabs);
    } else {
      running = stages(kAllColumns, kAllSlabs);
    }
    if constexpr (kMnA && kMnB)
      if (end < tile.k_end)
        rest = multiply_rest<In, kBlockN>(d, shared, tile.k_end - end, end == begin, at, first_slice);
    pass_turn<kPingPong>(shared, warpgroup, lane);
    wait_multiplies<0>();
    settle(d);
    if (running >= 0) consumer_release(&shared.empty[running], lane);
    if (kMnA && kMnB && rest >= 0) consumer_release(&shared.empty[rest], lane);
  }
};

}  // namespace jax_ep::gemm
