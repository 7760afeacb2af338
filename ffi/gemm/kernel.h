// The Hopper kernel: one producer warp loads tiles by TMA, two consumer warpgroups multiply and store them, and the
// blocks stay for all their tiles. So loads of the next tile run during the stores of the last; where the warpgroups
// take tiles in turns, its multiplies do too.
#pragma once

#include "comm/target/ptx/block.h"
#include "gemm/epilogue.h"
#include "gemm/layout.h"
#include "gemm/ptx/cluster.h"
#include "gemm/ptx/tma.h"
#include "gemm/ptx/warps.h"
#include "gemm/ptx/wgmma.h"
#include "gemm/schedule.h"

namespace jax_ep::gemm {

// From where to load a's part of a tile: in the coordinates of the map, which need not be those of the whole product.
struct Rows {
  const CUtensorMap& map;
  int first;
};

// What others add to a product. `before_tile` runs in the producer warp before the tile's first load and says where a's
// rows are, `after_tile` in every consumer warp after its stores were issued, or after they were written where
// kAwaitStores says so, `after_last` behind its last tile. Where kStores is set, `store` does what store_tile does.
// Unless Beside is Nothing, `run_beside` runs in the other kWarpsBeside warps of the block, which have it in shared
// memory.
struct NoHooks {
  static constexpr bool kStores = false, kAwaitStores = false;
  using Beside = Nothing;
  __device__ Rows before_tile(const Tile& tile, const CUtensorMap& a) const { return {a, tile.row}; }
  __device__ void after_tile(const Tile&, int /*warp*/) const {}
  __device__ void after_last(const Tile&, int /*tiles*/, int /*warp*/) const {}
};

template <int kBlockN, class Hooks>
using SharedFor = Shared<kBlockN, typename Hooks::Beside>;

// A stage of the pipeline and how often it came round.
template <int kStages>
struct Position {
  int stage = 0;
  uint32_t parity = 0;

  JAX_EP_FN void advance() {
    if (++stage < kStages) return;
    stage = 0;
    parity ^= 1;
  }
  JAX_EP_FN void advance(int stages) {
    stage += stages;
    parity ^= stage / kStages & 1;
    stage %= kStages;
  }
};

// This block's slices of an operand, of which the first `wanted` are: all, or half of them for both blocks of the
// cluster. What lies wholly outside is not even filled with zeros, for which TMA takes its time.
template <bool kMn, int kSlices>
JAX_EP_FN void load_slices(char* to, const CUtensorMap& map, int row, int k, int matrix, int wanted, bool once,
                           bool shared, int rank, uint64_t* barrier) {
  const int begin = shared ? rank * kSlices / 2 : 0, end = shared ? begin + kSlices / 2 : kSlices;
#pragma unroll
  for (int slice = 0; slice < kSlices; ++slice) {
    if (slice < begin || slice >= end || slice >= wanted) continue;
    const int first = row + slice * kSlice;
    const Corner at = kMn ? Corner{first, k, matrix} : Corner{k, first, matrix};
    if (shared)
      load_box_to(0b11, to + slice * kSliceBytes, map, at, barrier);
    else if (once)
      load_box_once(to + slice * kSliceBytes, map, at, barrier);
    else
      load_box(to + slice * kSliceBytes, map, at, barrier);
  }
}

template <int kBlockN, bool kMnA, bool kMnB, class Hooks>
__device__ void produce(SharedFor<kBlockN, Hooks>& shared, const CUtensorMap& a, const CUtensorMap& b,
                        const Problem& problem, const Hooks& hooks, int block, int blocks) {
  using Memory = SharedFor<kBlockN, Hooks>;
  constexpr int kSlicesB = kBlockN / kSlice;
  const int rank = blockIdx.x % kCluster;
  Position<Memory::kStages> at;
  Schedule schedule(problem, kBlockN, block, blocks);
  for (Tile tile; schedule.next(&tile);) {
    const Rows rows = hooks.before_tile(tile, a);
    const int matrix = problem.grouping == Grouping::rows ? tile.group : 0;
    const int slices_a = larger(0, smaller(ceil_div(tile.row_end - tile.row, kSlice), kSlicesA));  // with rows in them
    for (int k = tile.k_begin; k < tile.k_end; k += kBlockK, at.advance()) {
      char* const stage = shared.stages[at.stage];
      uint64_t* const full = &shared.full[at.stage];
      wait_barrier(&shared.empty[at.stage], at.parity ^ 1, "an empty stage");
      if (!elect_lane()) continue;
      ptx::arrive_expecting(full, (slices_a + kSlicesB) * kSliceBytes);
      load_slices<kMnA, kSlicesA>(stage, rows.map, rows.first, k, 0, slices_a, /*once=*/false, tile.common == Common::a,
                                  rank, full);
      load_slices<kMnB, kSlicesB>(stage + kSlicesA * kSliceBytes, b, tile.col, k, matrix, kSlicesB,
                                  /*once=*/problem.m <= kBlockM, tile.common == Common::b, rank, full);
    }
  }
  // Until the peer's consumers have released every stage: then nobody writes into this block's shared memory.
  for (int stage = 0; stage < Memory::kStages; ++stage, at.advance())
    wait_barrier(&shared.empty[at.stage], at.parity ^ 1, "the last of both blocks' consumers");
}

// The contraction ends inside this stage: the lines from `valid` on belong to the next group, whatever they hold.
template <int kBlockN>
JAX_EP_FN void zero_lines(char* stage, int valid) {
  const int pieces = (kSlice - valid) * (kLineBytes / 16);
  constexpr int kThreads = kConsumers / kParts<kBlockN>;
  for (int i = threadIdx.x % kThreads; i < Shared<kBlockN>::kSlices * pieces; i += kThreads)
    *reinterpret_cast<uint4*>(stage + i / pieces * kSliceBytes + valid * kLineBytes + i % pieces * 16) = uint4{};
  ptx::shared_proxy_fence();
  ptx::sync_some(1 + threadIdx.x / kThreads, kThreads);
}

// Tells both producers of the cluster that this warp is done with a stage.
JAX_EP_FN void release(uint64_t* empty, int lane) {
  if (lane < kCluster) arrive_at_peer(empty, lane);
}

// Where warpgroups take turns: waits for this one's, of so many, and lets the other go on with the stages that follow.
template <int kBlockN, class Memory>
JAX_EP_FN void await_turn(Memory& shared, int turn, int warpgroup) {
  if constexpr (in_turns(kBlockN)) wait_barrier(&shared.turn[warpgroup], (turn + 1 + warpgroup) & 1, "a turn");
}
template <int kBlockN, class Memory>
JAX_EP_FN void pass_turn(Memory& shared, int warpgroup, int lane) {
  if (in_turns(kBlockN) && lane == 0) ptx::arrive(&shared.turn[1 - warpgroup]);
}

// Nothing of what a warpgroup would multiply is wanted: its loads pass by.
template <class Memory>
JAX_EP_FN void skip(Memory& shared, const Tile& tile, Position<Memory::kStages>& at, int lane) {
  for (int k = tile.k_begin; k < tile.k_end; k += kBlockK, at.advance()) {
    wait_barrier(&shared.full[at.stage], at.parity, "a full stage to skip");
    release(&shared.empty[at.stage], lane);
  }
}

// What a warpgroup multiplies of a tile: d = a x b.
template <class In, int kBlockN, bool kMnA, bool kMnB, class Memory>
JAX_EP_FN void accumulate(float (&d)[kParts<kBlockN>][kBlockN / 2], Memory& shared, const Problem& problem,
                          const Tile& tile, Position<Memory::kStages>& at, int warpgroup, int lane) {
  const int first_slice = in_turns(kBlockN) ? 0 : warpgroup;
  int running = -1;  // the stage that wgmma may still read
  if (tile.k_begin >= tile.k_end) {
#pragma unroll
    for (auto& part : d)
#pragma unroll
      for (float& value : part) value = 0;
    return pass_turn<kBlockN>(shared, warpgroup, lane);
  }
#pragma unroll
  for (auto& part : d) leave_undefined(part);
  for (int k = tile.k_begin; k < tile.k_end; k += kBlockK, at.advance()) {
    char* const stage = shared.stages[at.stage];
    wait_barrier(&shared.full[at.stage], at.parity, "a full stage");
    if constexpr (kMnA && kMnB)
      if (problem.grouping == Grouping::contraction && tile.k_end - k < kBlockK)
        zero_lines<kBlockN>(stage, tile.k_end - k);
    const uint64_t a = describe<kMnA>(stage + first_slice * kSliceBytes);
    const uint64_t b = describe<kMnB>(stage + kSlicesA * kSliceBytes);
    begin_multiplies();
#pragma unroll
    for (int step = 0; step < kBlockK / kMultiplyK; ++step)
#pragma unroll
      for (int part = 0; part < kParts<kBlockN>; ++part)
        multiply<In, kMnA, kMnB>(d[part], a + part * (kSliceBytes >> 4) + step * kDescriptorStep<kMnA>,
                                 b + step * kDescriptorStep<kMnB>, k > tile.k_begin || step > 0);
    commit_multiplies();
    wait_multiplies<1>();
    if (running >= 0) release(&shared.empty[running], lane);
    running = at.stage;
  }
  pass_turn<kBlockN>(shared, warpgroup, lane);
  wait_multiplies<0>();
#pragma unroll
  for (auto& part : d) settle(part);
  if (running >= 0) release(&shared.empty[running], lane);
}

// A warp's part of a tile, to where the hooks want it.
template <class Out, int kBlockN, class Hooks>
JAX_EP_FN void store(const CUtensorMap& map, Out* out, const Problem& problem, const Hooks& hooks, const Tile& tile,
                     const float (&d)[kBlockN / 2], char (*buffers)[kOutBytes], int slot, int lane) {
  if constexpr (Hooks::kStores)
    hooks.template store<kBlockN>(tile, d, buffers, slot, lane);
  else
    store_tile<Out, kBlockN>(map, out, problem, tile, d, buffers, slot, lane);
}

template <class In, class Out, int kBlockN, bool kMnA, bool kMnB, class Hooks>
__device__ void consume(SharedFor<kBlockN, Hooks>& shared, const CUtensorMap& map, Out* out, const Problem& problem,
                        const Hooks& hooks, int block, int blocks) {
  const int warp = uniform(threadIdx.x / 32), warpgroup = warp / kWarpgroup, lane = threadIdx.x % 32;
  Position<SharedFor<kBlockN, Hooks>::kStages> at;
  Schedule schedule(problem, kBlockN, block, blocks);
  Tile tile{};
  int tiles = 0;
  uint32_t swaps = 0;
  for (; schedule.next(&tile); ++tiles) {
    if (in_turns(kBlockN) && tiles % 2 != warpgroup) {
      at.advance(ceil_div(larger(tile.k_end - tile.k_begin, 0), kBlockK));
      continue;
    }
    await_turn<kBlockN>(shared, tiles / 2, warpgroup);
    const int first_row = tile.row + (in_turns(kBlockN) ? 0 : warpgroup * kSlice);
    const bool wanted = first_row < tile.row_end && tile.col < problem.n;
    if (wanted || problem.grouping == Grouping::contraction) {  // where both halves meet to zero lines
      float d[kParts<kBlockN>][kBlockN / 2];
      accumulate<In, kBlockN, kMnA, kMnB>(d, shared, problem, tile, at, warpgroup, lane);
#pragma unroll
      for (int part = 0; part < kParts<kBlockN>; ++part) {
        const int slot = slot_of<kBlockN>(part, warp);
        if (!kCanSplit<kBlockN> || tile.common != Common::tile) {
          store<Out, kBlockN>(map, out, problem, hooks, tile, d[part], shared.out[warp], slot, lane);
        } else if constexpr (kCanSplit<kBlockN>) {
          float half_d[kBlockN / 4];
          swap_halves(half_d, d[part], shared, swaps++ & 1, warp, lane);
          store<Out, kBlockN / 2>(map, out, problem, hooks, tile, half_d, shared.out[warp], slot, lane);
        }
      }
    } else {
      skip(shared, tile, at, lane);
      pass_turn<kBlockN>(shared, warpgroup, lane);
    }
    if constexpr (Hooks::kAwaitStores) {
      if (lane == 0) ptx::wait_stores_written<0>();
      __syncwarp();
    }
    hooks.after_tile(tile, warp);
  }
  hooks.after_last(tile, tiles, warp);
  if (lane == 0) ptx::wait_stores_written<0>();  // shared memory goes with the block; others look at the result
}

template <int kBlockN, class Memory>
JAX_EP_FN void open_pipeline(Memory& shared) {
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Memory::kStages; ++stage) {
      ptx::init_barrier(&shared.full[stage], 1);
      ptx::init_barrier(&shared.empty[stage], kConsumerWarps / kParts<kBlockN> * kCluster);
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

// Of a thread, of the 168 with which it starts.
template <class Beside>
struct Registers {
  static constexpr int kConsumer = 192, kOther = 120;
};
template <>
struct Registers<Nothing> {
  static constexpr int kConsumer = 224, kOther = 56;
};

// The part of one of `blocks` blocks. kMnA, kMnB: the contiguous dimension of a is m, of b is n, rather than k. `a`,
// `b` map slices, `out_map` a warp's box.
template <class In, class Out, int kBlockN, bool kMnA, bool kMnB, class Hooks>
JAX_EP_FN void multiply_tiles(char* memory, const CUtensorMap& a, const CUtensorMap& b, const CUtensorMap& out_map,
                              void* out, const Problem& problem, const Hooks& hooks, int block, int blocks) {
  using Beside = typename Hooks::Beside;
  auto& shared = *reinterpret_cast<SharedFor<kBlockN, Hooks>*>(memory);
  open_pipeline<kBlockN>(shared);
  const int warp = uniform(threadIdx.x / 32);
  if (warp < kConsumerWarps) {
    take_registers<Registers<Beside>::kConsumer>();
    consume<In, Out, kBlockN, kMnA, kMnB>(shared, out_map, static_cast<Out*>(out), problem, hooks, block, blocks);
  } else {
    give_registers<Registers<Beside>::kOther>();
    if (warp == kConsumerWarps) {
      produce<kBlockN, kMnA, kMnB>(shared, a, b, problem, hooks, block, blocks);
    } else if constexpr (!std::is_empty_v<Beside>) {
      hooks.run_beside(warp - kConsumerWarps - 1, block, blocks);
    }
  }
}

template <class In, class Out, int kBlockN, bool kMnA, bool kMnB, class Hooks>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    gemm_kernel(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
                const __grid_constant__ CUtensorMap out_map, void* out, const __grid_constant__ Problem problem,
                const __grid_constant__ Hooks hooks) {
  extern __shared__ __align__(1024) char memory[];
  multiply_tiles<In, Out, kBlockN, kMnA, kMnB>(memory, a, b, out_map, out, problem, hooks, blockIdx.x, gridDim.x);
}

}  // namespace jax_ep::gemm
