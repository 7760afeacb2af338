// The Hopper kernel: one producer warp loads tiles by TMA, two consumer warpgroups multiply and store them, and the
// CTAs stay for all their tiles. So loads of the next tile run during the stores of the last; where the warpgroups
// ping-pong, its multiplies do too.
#pragma once

#include "comm/target/ptx/cta.h"
#include "gemm/epilogue.h"
#include "gemm/layout.h"
#include "gemm/load.h"
#include "gemm/ptx/cluster.h"
#include "gemm/ptx/tma.h"
#include "gemm/ptx/warps.h"
#include "gemm/ptx/wgmma.h"
#include "gemm/schedule.h"

namespace jax_ep::gemm {

// What others add to a product. `before_tile` runs in the producer warp before the tile's first load and says where a's
// rows are, `after_tile` in every consumer warp after its stores were issued, or after they were written where
// kAwaitStores says so, `after_last` behind its last tile. Where kStores is set, `store` does what store_tile does.
// Unless Aux is Nothing, `run_aux` runs in the kAuxWarps aux warps of the CTA, which have it in shared memory.
struct NoHooks {
  static constexpr bool kStores = false, kAwaitStores = false;
  using Aux = Nothing;
  __device__ Rows before_tile(const Tile& tile, const CUtensorMap& a) const { return {a, tile.row}; }
  __device__ void after_tile(const Tile&, int /*warp*/) const {}
  __device__ void after_last(const Tile&, int /*tiles*/, int /*warp*/) const {}
};

template <int kValue>
using Constant = std::integral_constant<int, kValue>;

// The contraction ends inside this stage: the lines from `valid` on, up to where a multiply ends, belong to the next
// group, whatever they hold.
template <int kBlockN>
JAX_EP_FN void zero_lines(char* stage, int valid) {
  constexpr int kThreads = kConsumers / kParts<kBlockN>, kVecs = kLineBytes / 16;
  static_assert((kMultiplyK - 1) * kVecs <= kThreads, "a thread zeroes one vector of a slice");
  const int thread = threadIdx.x % kThreads, vecs = (ceil_div(valid, kMultiplyK) * kMultiplyK - valid) * kVecs;
  if (vecs == 0) return;
  char* const first = stage + valid * kLineBytes + thread * 16;
#pragma unroll
  for (int slice = 0; slice < Shared<kBlockN>::kSlices; ++slice)
    if (thread < vecs) *reinterpret_cast<uint4*>(first + slice * kSliceBytes) = uint4{};
  ptx::shared_proxy_fence();
  ptx::sync_some(1 + threadIdx.x / kThreads, kThreads);
}

// Tells both producers of the cluster that this warp is done with a stage.
JAX_EP_FN void release(uint64_t* empty, int lane) {
  if (lane < kCluster) arrive_at_peer(empty, lane);
}

// Where the warpgroups ping-pong: waits for this one's turn, by its number, and lets the other go on with the stages
// that follow.
template <int kBlockN, class Memory>
JAX_EP_FN void await_turn(Memory& shared, int turn, int warpgroup) {
  if constexpr (is_ping_pong(kBlockN)) wait_barrier(&shared.turn[warpgroup], (turn + 1 + warpgroup) & 1, "a turn");
}
template <int kBlockN, class Memory>
JAX_EP_FN void pass_turn(Memory& shared, int warpgroup, int lane) {
  if (is_ping_pong(kBlockN) && lane == 0) ptx::arrive(&shared.turn[1 - warpgroup]);
}

// Nothing of what a warpgroup would multiply is wanted: the loads of so much contraction pass by.
template <class Memory>
JAX_EP_FN void skip(Memory& shared, int contraction, Position<Memory::kStages>& at, int lane) {
  for (int k = 0; k < contraction; k += kBlockK, at.advance()) {
    wait_barrier(&shared.full[at.stage], at.parity, "a full stage to skip");
    release(&shared.empty[at.stage], lane);
  }
}

// One step of a stage: so much of d += a x b, or = where it is the first.
template <class In, int kWidth, int kParts, bool kMnA, bool kMnB, int kAll, int kCount>
JAX_EP_FN void multiply_step(float (&d)[kAll][kCount], uint64_t a, uint64_t b, int step, bool is_first) {
#pragma unroll
  for (int part = 0; part < kParts; ++part)
    multiply<In, kWidth, kMnA, kMnB>(d[part], a + part * (kSliceBytes >> 4) + step * kDescriptorStep<kMnA>,
                                     b + step * kDescriptorStep<kMnB>, !is_first);
}

// Whole stages of a tile, up to `end`: d = a x b in the first kWidth columns of kParts. Returns the stage that wgmma
// may still read, or -1.
template <class In, int kWidth, int kParts, bool kMnA, bool kMnB, class Memory, int kAll, int kCount>
JAX_EP_FN int multiply_stages(float (&d)[kAll][kCount], Memory& shared, int begin, int end,
                              Position<Memory::kStages>& at, int first_slice, int lane) {
  int running = -1;
  for (int k = begin; k < end; k += kBlockK, at.advance()) {
    const char* const stage = shared.stages[at.stage];
    wait_barrier(&shared.full[at.stage], at.parity, "a full stage");
    const uint64_t a = describe<kMnA>(stage + first_slice * kSliceBytes);
    const uint64_t b = describe<kMnB>(stage + kSlicesA * kSliceBytes);
    begin_multiplies();
#pragma unroll
    for (int step = 0; step < kBlockK / kMultiplyK; ++step)
      multiply_step<In, kWidth, kParts, kMnA, kMnB>(d, a, b, step, k == begin && step == 0);
    commit_multiplies();
    wait_multiplies<1>();
    if (running >= 0) release(&shared.empty[running], lane);
    running = at.stage;
  }
  return running;
}

// The last stage of a group whose contraction ends inside it: only the steps that it needs, of all columns.
template <class In, int kBlockN, class Memory>
JAX_EP_FN int multiply_rest(float (&d)[kParts<kBlockN>][kBlockN / 2], Memory& shared, int valid, bool is_first,
                            Position<Memory::kStages>& at, int first_slice) {
  char* const stage = shared.stages[at.stage];
  wait_barrier(&shared.full[at.stage], at.parity, "a full stage");
  zero_lines<kBlockN>(stage, valid);
  const uint64_t a = describe<true>(stage + first_slice * kSliceBytes);
  const uint64_t b = describe<true>(stage + kSlicesA * kSliceBytes);
  int step = 0;
#pragma unroll 1
  do {
    begin_multiplies();
    multiply_step<In, kBlockN, kParts<kBlockN>, true, true>(d, a, b, step, is_first && step == 0);
    commit_multiplies();
  } while (++step * kMultiplyK < valid);
  const int last = at.stage;
  at.advance();
  return last;
}

// What a warpgroup multiplies of a tile: d = a x b, by no more columns and rows than the tile has, roughly.
template <class In, int kBlockN, bool kMnA, bool kMnB, class Memory>
JAX_EP_FN void accumulate(float (&d)[kParts<kBlockN>][kBlockN / 2], Memory& shared, const Problem& problem,
                          const Tile& tile, Position<Memory::kStages>& at, int warpgroup, int lane) {
  if (tile.k_begin >= tile.k_end) {
#pragma unroll
    for (auto& part : d)
#pragma unroll
      for (float& value : part) value = 0;
    return pass_turn<kBlockN>(shared, warpgroup, lane);
  }
#pragma unroll
  for (auto& part : d) leave_undefined(part);
  const int first_slice = is_ping_pong(kBlockN) ? 0 : warpgroup, begin = tile.k_begin;
  const bool ends_inside = kMnA && kMnB && problem.grouping == Grouping::k_grouped;
  const int end = ends_inside ? tile.k_end - (tile.k_end - begin) % kBlockK : tile.k_end;
  const auto stages = [&](auto width, auto parts) {
    return multiply_stages<In, decltype(width)::value, decltype(parts)::value, kMnA, kMnB>(d, shared, begin, end, at,
                                                                                           first_slice, lane);
  };
  constexpr Constant<kBlockN> kAllColumns;
  constexpr Constant<kParts<kBlockN>> kAllParts;
  int running, rest = -1;  // stages that wgmma may still read
  if constexpr (kHasEdges<kBlockN>) {
    const int columns = problem.n - tile.col;
    if (tile.row_end - tile.row <= kSlice)
      running = stages(kAllColumns, Constant<1>{});
    else if (columns <= 64)
      running = stages(Constant<64>{}, kAllParts);
    else if (columns <= 128)
      running = stages(Constant<128>{}, kAllParts);
    else
      running = stages(kAllColumns, kAllParts);
  } else {
    running = stages(kAllColumns, kAllParts);
  }
  if constexpr (kMnA && kMnB)
    if (end < tile.k_end) rest = multiply_rest<In, kBlockN>(d, shared, tile.k_end - end, end == begin, at, first_slice);
  pass_turn<kBlockN>(shared, warpgroup, lane);
  wait_multiplies<0>();
#pragma unroll
  for (auto& part : d) settle(part);
  if (running >= 0) release(&shared.empty[running], lane);
  if (kMnA && kMnB && rest >= 0) release(&shared.empty[rest], lane);
}

// A warp's part of a tile, to where the hooks want it.
template <class Out, int kBlockN, class Hooks>
JAX_EP_FN void store(const CUtensorMap& map, Out* out, const Problem& problem, const Hooks& hooks, const Tile& tile,
                     const float (&d)[kBlockN / 2], char (*buffers)[kOutBytes], int strip, int lane) {
  if constexpr (Hooks::kStores)
    hooks.template store<kBlockN>(tile, d, buffers, strip, lane);
  else
    store_tile<Out, kBlockN>(map, out, problem, tile, d, buffers, strip, lane);
}

template <class In, class Out, int kBlockN, bool kMnA, bool kMnB, class Hooks>
JAX_EP_FN void consume(SharedFor<kBlockN, Hooks>& shared, const CUtensorMap& map, Out* out, const Problem& problem,
                       const Hooks& hooks, Share share) {
  const int warp = uniform(threadIdx.x / 32), warpgroup = warp / kWarpgroup, lane = threadIdx.x % 32;
  Position<SharedFor<kBlockN, Hooks>::kStages> at;
  Schedule schedule(problem, kBlockN, share);
  Tile tile{};
  int tiles = 0;
  uint32_t swaps = 0;
  for (; schedule.next(&tile); ++tiles) {
    if (is_ping_pong(kBlockN) && tiles % 2 != warpgroup) {
      at.advance(ceil_div(larger(tile.k_end - tile.k_begin, 0), kBlockK));
      continue;
    }
    await_turn<kBlockN>(shared, tiles / 2, warpgroup);
    const int first_row = tile.row + (is_ping_pong(kBlockN) ? 0 : warpgroup * kSlice);
    const bool wanted = first_row < tile.row_end && tile.col < problem.n;
    const bool meets = !is_ping_pong(kBlockN) && problem.grouping == Grouping::k_grouped;  // the other, to zero lines
    if (wanted || meets) {
      float d[kParts<kBlockN>][kBlockN / 2];
      accumulate<In, kBlockN, kMnA, kMnB>(d, shared, problem, tile, at, warpgroup, lane);
#pragma unroll
      for (int part = 0; part < kParts<kBlockN>; ++part) {
        const int strip = strip_of<kBlockN>(part, warp);
        if (!kCanSplit<kBlockN> || tile.common != Common::tile) {
          store<Out, kBlockN>(map, out, problem, hooks, tile, d[part], shared.out[warp], strip, lane);
        } else if constexpr (kCanSplit<kBlockN>) {
          float half_d[kBlockN / 4];
          swap_halves(half_d, d[part], shared, swaps++ & 1, warp, lane);
          store<Out, kBlockN / 2>(map, out, problem, hooks, tile, half_d, shared.out[warp], strip, lane);
        }
      }
    } else {
      skip(shared, tile.k_end - tile.k_begin, at, lane);
      pass_turn<kBlockN>(shared, warpgroup, lane);
    }
    if constexpr (Hooks::kAwaitStores) {
      if (lane == 0) ptx::wait_stores_written<0>();
      __syncwarp();
    }
    hooks.after_tile(tile, warp);
  }
  hooks.after_last(tile, tiles, warp);
  if (lane == 0) ptx::wait_stores_written<0>();  // shared memory goes with the CTA; others look at the result
}

// `consumers`: the warps of a CTA that release each stage. `producers`: those that fill it.
template <class Memory>
JAX_EP_FN void open_pipeline(Memory& shared, int consumers, int producers = 1) {
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Memory::kStages; ++stage) {
      ptx::init_barrier(&shared.full[stage], producers);
      ptx::init_barrier(&shared.empty[stage], consumers * kCluster);
    }
    for (uint64_t& turn : shared.turn) ptx::init_barrier(&turn, kWarpgroup);
    for (int warp = 0; warp < kConsumerWarps; ++warp) {
      ptx::init_barrier(&shared.vacant[warp], 1);
      ptx::init_barrier(&shared.brought[warp], 32);
    }
    ptx::publish_barriers();
  }
  sync_cluster();
}

// Registers of a thread, out of the 168 with which each starts, by how many of them are accumulators.
template <class Aux, int kAccumulators>
struct Registers {
  static constexpr int kConsumer = 192, kOther = 120;
};
template <>
struct Registers<Nothing, 128> {
  static constexpr int kConsumer = 224, kOther = 56;
};
template <class Aux>
struct Registers<Aux, 192> {
  static constexpr int kConsumer = 240, kOther = 24;
};

// This CTA among all.
JAX_EP_FN Share this_share() { return {static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x)}; }

// The part of a CTA. kMnA, kMnB: the contiguous dimension of a is m, of b is n, rather than k. `a`, `b`
// map slices, `out_map` a warp's box.
template <class In, class Out, int kBlockN, bool kMnA, bool kMnB, class Hooks>
JAX_EP_FN void multiply_tiles(char* memory, const CUtensorMap& a, const CUtensorMap& b, const CUtensorMap& out_map,
                              void* out, const Problem& problem, const Hooks& hooks, Share share) {
  using Aux = typename Hooks::Aux;
  using Wanted = Registers<Aux, kParts<kBlockN> * kBlockN / 2>;
  auto& shared = *reinterpret_cast<SharedFor<kBlockN, Hooks>*>(memory);
  open_pipeline(shared, kConsumerWarps / kParts<kBlockN>);
  const int warp = uniform(threadIdx.x / 32);
  if (warp < kConsumerWarps) {
    take_registers<Wanted::kConsumer>();
    consume<In, Out, kBlockN, kMnA, kMnB>(shared, out_map, static_cast<Out*>(out), problem, hooks, share);
  } else {
    give_registers<Wanted::kOther>();
    if (warp == kConsumerWarps) {
      produce<kMnA>(shared, a, Columns<kBlockN, kMnB>{b}, problem, hooks, share);
    } else if constexpr (!std::is_empty_v<Aux>) {
      hooks.run_aux(share);
    }
  }
}

template <class In, class Out, int kBlockN, bool kMnA, bool kMnB, class Hooks>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    gemm_kernel(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
                const __grid_constant__ CUtensorMap out_map, void* out, const __grid_constant__ Problem problem,
                const __grid_constant__ Hooks hooks) {
  extern __shared__ __align__(1024) char memory[];
  multiply_tiles<In, Out, kBlockN, kMnA, kMnB>(memory, a, b, out_map, out, problem, hooks, this_share());
}

}  // namespace jax_ep::gemm
