// The persistent kernel of every product. A CTA has two consumer warpgroups, which multiply and store tiles, a producer
// warp, which loads their operands stage by stage, and three aux warps. The loads of the next tile run while the last
// one is stored.
//
// A kernel is a Mainloop and an Epilogue. A Mainloop has these types and constants
//   Source            where the operands come from (source.h)
//   Tile              what tiles() yields: Tile (schedule.h) or RowTile (row_schedule.h)
//   Memory<Aux>       the shared memory of a CTA; Aux is that of the hooks
//   Accumulators      the sums of a thread, in kAccumulators registers
//   kPingPong         whether the consumer warpgroups take tiles in turns; else each has a part of every tile
//   kProducers        how many warps announce that a stage is full, besides the bytes of TMA
//   kGathers          whether the aux warps gather an operand (gather.h)
// and these functions
//   open(), close()   all threads call, before the first and after the last use of shared memory
//   tiles()           the tiles of a CTA: each warp walks the same list
//   has_work()        whether a warpgroup multiplies anything of a tile
//   accumulate()      multiplies a tile: consumes its stages
//   store()           hands the sums to the epilogue; `stored` is a counter of its own (epilogue.h)
//   taker()           takes tiles off a queue, where there is one (tile_queue.h)
//   assist()          what the aux warps do
// An Epilogue has store(), in the form that the Mainloop calls (epilogue.h), and may have begin() (ReadsAhead).
// Sources and epilogues of grouped_matmul_kernel are constructed from (maps, product).
//
// Mainloops: multiply.h (tiles of fixed height) and multiply_*.h. Epilogues: epilogue.h, epilogue_gated.h.
// runtime/cuda/grouped_matmul_*.cu list the compiled kernels.
#pragma once

#include <type_traits>

#include "comm/timeline.h"
#include "gemm/maps.h"
#include "gemm/pipeline.h"
#include "gemm/source.h"

namespace jax_ep::gemm {

// What a collective adds to a product in tiles of fixed height (kernels/collective_matmul/overlap.h).
//   before_tile()   runs in the producer warp before the first load of a tile, and says where lhs's rows are
//   after_tile()    runs in each consumer warp after its stores of a tile; if kAwaitStores, these are written by then
//   after_last()    runs in each consumer warp after its last tile
//   run_aux()       runs in the aux warps, which have an Aux in shared memory, unless Aux is Nothing
struct NoHooks {
  static constexpr bool kAwaitStores = false;
  using Aux = Nothing;
  template <class Tile>
  JAX_EP_FN Rows before_tile(const Tile& tile, const CUtensorMap& lhs) const {
    return {lhs, tile.row};
  }
  template <class Tile>
  JAX_EP_FN void after_tile(const Tile&, int /*warp*/) const {}
  template <class Tile>
  JAX_EP_FN void after_last(const Tile&, int /*tiles*/, int /*warp*/) const {}
};

// The timeline of this device's products during a profile, or null. Each file of kernels has its own word. It is in
// constant memory, because a test of that takes no register and waits for no load from global memory.
static __constant__ const Timeline* product_timeline;

// Records in the timeline that the first warp of this CTA begins `phase`: a tile, or none. Products of a collective do
// nothing, because some of their kernels would spill more (matmul_exchange.cu, in float16).
template <class Hooks>
JAX_EP_FN void enter(const Problem& problem, Phase phase, int warp) {
  if (!std::is_same_v<Hooks, NoHooks> || warp != 0 || !product_timeline) return;
  // The host may end the profile now, and the compiler may read constant memory twice. A shuffle keeps one value.
  const auto address = __shfl_sync(~0u, reinterpret_cast<uint64_t>(product_timeline), 0);
  const auto* const timeline = reinterpret_cast<const Timeline*>(address);
  if (threadIdx.x == 0 && timeline && blockIdx.x < timeline->ctas)
    append(&timeline->tracks[blockIdx.x], problem.matrix, OpKind{}, phase);
  __syncwarp();
}

JAX_EP_FN Part this_cta() { return {static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x)}; }

// The number of stages of a tile. TMA pads the last stage of each term with zeros.
template <class Source, class Tile>
JAX_EP_FN int stages_of(const Tile& tile) {
  return Source::kTerms * ceil_div(larger(tile.k_end - tile.k_begin, 0), Source::stage_k(tile));
}

// A producer warp: fills the stages of all tiles of a CTA.
template <class Mainloop, class Memory, class Hooks>
__device__ void produce(Memory& shared, const typename Mainloop::Source& source, const Problem& problem,
                        const Hooks& hooks, Part cta) {
  const int cta_in_cluster = blockIdx.x % kCluster;
  PipelineState<Memory::kStages> at;
  auto tiles = Mainloop::tiles(shared, problem, cta);
  for (typename Mainloop::Tile tile; tiles.next(&tile);) {
    const auto opened = source.open(problem, tile, hooks);
    for (int term = 0; term < Mainloop::Source::kTerms; ++term)
      for (int k = tile.k_begin; k < tile.k_end; k += source.stage_k(tile), at.advance()) {
        wait_barrier(&shared.empty[at.stage], at.parity ^ 1, "an empty stage");
        source.load(shared.stages[at.stage], problem, tile, opened, term, k, cta_in_cluster, &shared.full[at.stage]);
      }
  }
  producer_tail(shared, at);
}

// An epilogue that reads operands of store() before a tile with swapped operands is multiplied.
template <class Epilogue, class Mainloop>
concept ReadsAhead = requires(const Epilogue& epilogue, const Problem& problem, const RowTile& tile) {
  epilogue.template begin<Mainloop::kSlabs>(problem, tile, /*warp=*/0, /*lane=*/0);
};

// A consumer warp: multiplies and stores all tiles of a CTA, or, if the warpgroups ping-pong, every second tile.
template <class Mainloop, class Memory, class Epilogue, class Hooks>
__device__ void consume(Memory& shared, const typename Mainloop::Source& source, const Epilogue& epilogue,
                        const Problem& problem, const Hooks& hooks, Part cta) {
  using Source = typename Mainloop::Source;
  constexpr bool kPingPong = Mainloop::kPingPong;
  const int warp = uniform(threadIdx.x / 32), warpgroup = warp / kWarpgroup, lane = threadIdx.x % 32;
  PipelineState<Memory::kStages> at;
  auto tiles = Mainloop::tiles(shared, problem, cta);
  typename Mainloop::Tile tile{};
  int taken = 0, stored = 0;
  enter<Hooks>(problem, Phase::multiply, warp);
  for (; tiles.next(&tile); ++taken) {
    if (kPingPong && taken % 2 != warpgroup) {
      at.advance(stages_of<Source>(tile));
      continue;
    }
    await_turn<kPingPong>(shared, taken / 2, warpgroup);
    if (Mainloop::has_work(source, problem, tile, warpgroup)) {
      typename Mainloop::Accumulators sums;
      if constexpr (ReadsAhead<Epilogue, Mainloop>)
        epilogue.template begin<Mainloop::kSlabs>(problem, tile, warp, lane);
      Mainloop::accumulate(sums, shared, source, problem, tile, at, warp, lane);
      Mainloop::store(epilogue, sums, shared, problem, tile, stored, warp, lane);
    } else {
      consumer_skip(shared, stages_of<Source>(tile), at, lane);
      pass_turn<kPingPong>(shared, warpgroup, lane);
    }
    if constexpr (Hooks::kAwaitStores) {
      if (lane == 0) ptx::wait_stores_written<0>();
      __syncwarp();
    }
    hooks.after_tile(tile, warp);
    enter<Hooks>(problem, Phase::multiply, warp);  // if there is no other tile, profiler.cc ignores this
  }
  hooks.after_last(tile, taken, warp);
  if (lane == 0) ptx::wait_stores_written<0>();  // before the CTA ends
  enter<Hooks>(problem, Phase::none, warp);
}

template <class Mainloop, class Epilogue, class Hooks>
JAX_EP_FN void run_matmul(char* memory, const typename Mainloop::Source& source, const Epilogue& epilogue,
                          const Problem& problem, const Hooks& hooks, Part cta) {
  static_assert(LoadsStages<typename Mainloop::Source, typename Mainloop::Tile, Hooks>);
  using Memory = typename Mainloop::template Memory<typename Hooks::Aux>;
  constexpr Registers kWanted = registers<typename Hooks::Aux, Mainloop::kAccumulators, Mainloop::kGathers>();
  static_assert(kWanted.consumer * kConsumers + kWanted.other * (kThreads - kConsumers) == kStartRegisters * kThreads,
                "what some warps take others must give");
  static_assert(sizeof(Memory) <= kSharedBytes, "a CTA may not have so much shared memory");
  auto& shared = *reinterpret_cast<Memory*>(memory);
  Mainloop::open(shared);
  open_pipeline(shared, Mainloop::kPingPong ? kWarpgroup : kConsumerWarps, Mainloop::kProducers);
  const int warp = uniform(threadIdx.x / 32);
  if (warp < kConsumerWarps) {
    warpgroup_reg_alloc<kWanted.consumer>();
    consume<Mainloop>(shared, source, epilogue, problem, hooks, cta);
  } else {
    warpgroup_reg_dealloc<kWanted.other>();
    if (warp == kConsumerWarps) {
      produce<Mainloop>(shared, source, problem, hooks, cta);
    } else if constexpr (!std::is_empty_v<typename Hooks::Aux>) {
      hooks.run_aux(cta);
    } else {
      Mainloop::assist(shared, source, problem, cta, warp - kFirstAuxWarp);
    }
  }
  Mainloop::close();
}

// The maps are a separate parameter: TMA takes their addresses, so the compiler would reload everything in the same
// struct.
template <class Mainloop, class Epilogue>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    grouped_matmul_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Problem problem,
                          const __grid_constant__ GroupedMatmul product) {
  extern __shared__ __align__(1024) char memory[];
  run_matmul<Mainloop>(memory, typename Mainloop::Source(maps, product), Epilogue(maps, product), problem, NoHooks{},
                       this_cta());
}

}  // namespace jax_ep::gemm
