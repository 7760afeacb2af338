// The persistent kernel of every product, from top to bottom.
//
// A CTA has three warpgroups. Two adjacent CTAs form a cluster. Their tiles share an operand, and each CTA loads half
// of it for both, unless it is gathered or the CTAs split a contraction.
//
//   warps 0-3 and 4-7   consumers: multiply the stages of a tile, then hand the sums to the epilogue (consume)
//   warp 8              the producer: fills a ring of stages by TMA (produce)
//   warps 9-11          aux warps: in a role, or in the hooks of a collective (run_matmul)
//
// Cooperative consumers have a part of every tile each: 64 rows, or with swapped operands 64 columns of the weights
// (128 if the weights are wide).
//
//   producer      | load 0 | load 1 | load 2    | load 3    |            at most kStages ahead of the multiplies
//   consumers 0-3     | multiply 0 | store 0 | multiply 1 | store 1 |
//   consumers 4-7     | multiply 0 | store 0 | multiply 1 | store 1 |
//
// Consumers that ping-pong take tiles in turns, so that one warpgroup stores while the other multiplies:
//
//   producer      | load 0 | load 1 | load 2    | load 3    |
//   consumers 0-3     | multiply 0 | store 0    | multiply 2 | store 2    |
//   consumers 4-7                  | multiply 1 | store 1    | multiply 3 | store 3    |
//
// The barriers in shared memory, and who arrives there for whom:
//
//   full[stage]          the bytes of TMA, the producer, and a role that fills a part of it -> the consumers
//   empty[stage]         the consumers of both CTAs, when wgmma has read the stage -> all who fill it
//   turn[warpgroup]      the other warpgroup, when its multiplies are issued -> a warpgroup that ping-pongs
//   swap_empty[warp],    the same warp of the other CTA -> a warp, if the CTAs split a contraction (epilogue.h)
//   swap_full[warp]
// tile_queue.h and gather.h have barriers of their own.
#pragma once

#include <algorithm>
#include <concepts>
#include <type_traits>

#include "comm/timeline.h"
#include "gemm/epilogue.h"
#include "gemm/pipeline.h"
#include "gemm/source.h"

namespace jax_ep::gemm {

// The role of aux warps that no operand needs: one of them fills the queue of tiles, if there is one (tile_queue.h).
struct DrawTiles {
  template <class Base>
  using Memory = Base;
  static constexpr bool kFills = false;
  static constexpr int kQueueReaders = 0, kRegisters = 24;
  JAX_EP_FN static void open(auto& /*shared*/) {}
  template <class Loop>
  JAX_EP_FN static void run(auto& shared, const auto& source, const Problem& problem, Part, int aux_warp) {
    if (aux_warp != 0 || blockIdx.x % kCluster != 0) return;
    for (auto all = Loop::Tiles::feeder(shared, source, problem); all.feed();) {
    }
  }
};

// A main loop: where operands come from, how a stage is multiplied, and what the aux warps do. mainloops.h has all.
template <class SourceOf, class MultiplyOf, class AuxRoleOf = DrawTiles>
struct Mainloop {
  using Source = SourceOf;
  using Multiply = MultiplyOf;
  using AuxRole = AuxRoleOf;
  using Tiles = typename Multiply::Tiles;
  using Tile = typename Tiles::Tile;
  template <class HookMemory = Nothing>
  using Memory = typename AuxRole::template Memory<typename Tiles::template Memory<HookMemory>>;
};

// A role of the aux warps.
//   Memory<Base>    the shared memory of a CTA: Base, and what the role needs
//   kFills          whether the role fills a part of every stage, which it announces by one arrival
//   kQueueReaders   how many aux warps read the queue of tiles, if there is one
//   kRegisters      what a thread of them needs
//   open()          one thread calls, before the first use of the barriers
//   run()           each aux warp calls
template <class Role, class Loop, class Memory>
concept IsAuxRole = requires(Memory& shared, const typename Loop::Source& source, const Problem& problem) {
  { Role::kFills } -> std::same_as<const bool&>;
  requires Role::kQueueReaders <= kAuxWarps;
  requires Role::kRegisters >= 24;
  Role::open(shared);
  Role::template run<Loop>(shared, source, problem, Part{}, /*aux_warp=*/0);
};

// The tiles of a CTA. Each warp walks the same list.
//   Memory<HookMemory>   the shared memory that they need
//   open()               one thread calls, before the first use of the barriers
//   close()              all threads call, after the last use of shared memory
//   list()               has next(), which is false after the last tile
//   feeder()             feeds the queue of tiles, if there is one
template <class Tiles, class Memory>
concept ListsTiles = requires(Memory& shared, const Problem& problem, typename Tiles::Tile* tile) {
  Tiles::open(shared, /*readers=*/0);
  { Tiles::list(shared, problem, Part{}).next(tile) } -> std::same_as<bool>;
  Tiles::close();
};

// The multiply step of a consumer warp.
//   Tiles          the tiles whose stages it multiplies
//   Accumulators   the sums of a thread, by slabs: of 64 rows, or of 64 columns if the operands are swapped
//   kPingPong      whether the consumer warpgroups take tiles in turns; else each has a part of every tile
//   kRegisters     what the sums need: 128 or 192
//   has_work()     whether a warpgroup multiplies anything of a tile
//   accumulate()   computes the sums of a tile: consumes its stages
template <class Multiply, class Source, class Memory>
concept MultipliesStages =
    requires(typename Multiply::Accumulators& sums, Memory& shared, const Source& source, const Problem& problem,
             const typename Multiply::Tiles::Tile& tile, PipelineState<Memory::kStages>& at) {
      requires Multiply::kRegisters == 128 || Multiply::kRegisters == 192;
      { Multiply::kPingPong } -> std::same_as<const bool&>;
      { Multiply::has_work(source, problem, tile, /*warpgroup=*/0) } -> std::same_as<bool>;
      Multiply::accumulate(sums, shared, source, problem, tile, at, /*warp=*/0, /*lane=*/0);
    };

// What a collective adds to a product in tiles of fixed height (kernels/collective_matmul/overlap.h).
//   before_tile()   runs in the producer warp before the first load of a tile, and says where lhs's rows are
//   after_tile()    runs in each consumer warp after its stores of a tile; if kAwaitStores, these are written by then
//   after_last()    runs in each consumer warp after its last tile
//   run_aux()       runs in the aux warps, which have an Aux in shared memory, unless Aux is Nothing
template <class Hooks, class Tile>
concept FollowsTiles = requires(const Hooks& hooks, const Tile& tile) {
  { Hooks::kAwaitStores } -> std::same_as<const bool&>;
  hooks.after_tile(tile, /*warp=*/0);
  hooks.after_last(tile, /*tiles=*/0, /*warp=*/0);
  requires std::is_empty_v<typename Hooks::Aux> || requires { hooks.run_aux(Part{}); };
};

struct NoHooks {
  static constexpr bool kAwaitStores = false;
  using Aux = Nothing;
  JAX_EP_FN Rows before_tile(const Tile& tile, const CUtensorMap& lhs) const { return {lhs, tile.row}; }
  JAX_EP_FN void after_tile(const auto& /*tile*/, int /*warp*/) const {}
  JAX_EP_FN void after_last(const auto& /*tile*/, int /*tiles*/, int /*warp*/) const {}
};

// The timeline of this device's products during a profile, or null. Each file of kernels has its own word. It is in
// constant memory, because a test of that takes no register and waits for no load from global memory.
static __constant__ const Timeline* product_timeline;

// Records in the timeline that the first warp of this CTA begins `phase`: a tile, or none. Products of a collective do
// nothing, because some of their kernels would spill more (those of two ranks, in float16).
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

// The producer warp: fills the stages of all tiles of a CTA.
template <class Loop, class Memory, class Hooks>
__device__ void produce(Memory& shared, const typename Loop::Source& source, const Problem& problem, const Hooks& hooks,
                        Part cta) {
  const int cta_in_cluster = blockIdx.x % kCluster;
  PipelineState<Memory::kStages> at;
  auto tiles = Loop::Tiles::list(shared, problem, cta);
  for (typename Loop::Tile tile; tiles.next(&tile);) {
    const auto opened = source.open(problem, tile, hooks);
    for (int term = 0; term < Loop::Source::kTerms; ++term)
      for (int k = tile.k_begin; k < tile.k_end; k += source.stage_k(tile), at.advance()) {
        wait_barrier(&shared.empty[at.stage], at.parity ^ 1, "an empty stage");
        source.load(shared.stages[at.stage], problem, tile, opened, term, k, cta_in_cluster, &shared.full[at.stage]);
      }
  }
  producer_tail(shared, at);
}

// A consumer warp: multiplies and stores all tiles of a CTA, or, if the warpgroups ping-pong, every second tile.
template <class Loop, class Memory, class Epilogue, class Hooks>
__device__ void consume(Memory& shared, const typename Loop::Source& source, const Epilogue& epilogue,
                        const Problem& problem, const Hooks& hooks, Part cta) {
  using Source = typename Loop::Source;
  using Multiply = typename Loop::Multiply;
  using Accumulators = typename Multiply::Accumulators;
  constexpr bool kPingPong = Multiply::kPingPong;
  const int warp = uniform(threadIdx.x / 32), warpgroup = warp / kWarpgroup, lane = threadIdx.x % 32;
  PipelineState<Memory::kStages> at;
  auto tiles = Loop::Tiles::list(shared, problem, cta);
  typename Loop::Tile tile{};
  int taken = 0, stored = 0;
  enter<Hooks>(problem, Phase::multiply, warp);
  for (; tiles.next(&tile); ++taken) {
    if (kPingPong && taken % 2 != warpgroup) {
      at.advance(stages_of<Source>(tile));
      continue;
    }
    await_turn<kPingPong>(shared, taken / 2, warpgroup);
    if (Multiply::has_work(source, problem, tile, warpgroup)) {
      Accumulators sums;
      if constexpr (ReadsAhead<Epilogue, Accumulators>)
        epilogue.template begin<std::extent_v<Accumulators>>(problem, tile, warp, lane);
      Multiply::accumulate(sums, shared, source, problem, tile, at, warp, lane);
      store_sums(epilogue, sums, shared, problem, tile, stored, warp, lane);
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

// All threads of the cluster call, before they use the barriers.
template <class Loop, class Memory>
JAX_EP_FN void open_barriers(Memory& shared) {
  constexpr int kReleasing = Loop::Multiply::kPingPong ? kWarpgroup : kConsumerWarps;  // warps of a CTA
  if (threadIdx.x == 0) {
    Loop::Tiles::open(shared, Loop::AuxRole::kQueueReaders);
    Loop::AuxRole::open(shared);
    for (int stage = 0; stage < Memory::kStages; ++stage) {
      ptx::init_barrier(&shared.full[stage], 1 + Loop::AuxRole::kFills);
      ptx::init_barrier(&shared.empty[stage], kReleasing * kCluster);
    }
    for (uint64_t& turn : shared.turn) ptx::init_barrier(&turn, kWarpgroup);
    for (int warp = 0; warp < kConsumerWarps; ++warp) {
      ptx::init_barrier(&shared.swap_empty[warp], 1);
      ptx::init_barrier(&shared.swap_full[warp], 32);
    }
    ptx::publish_barriers();
  }
  sync_cluster();
}

// The registers of a thread. All threads start with an equal share of the SM's 64 K, in steps of 8. The producer and
// the aux warps give registers to the consumers. Each keeps at least 24. They keep more if their role needs more, or if
// the consumers need only 128 for sums.
constexpr int kStartRegisters = 64 * 1024 / kThreads / 8 * 8;
template <class Loop, class Hooks>
constexpr int kOtherRegisters = std::max(std::is_empty_v<typename Hooks::Aux> ? Loop::AuxRole::kRegisters : 120,
                                         Loop::Multiply::kRegisters == 128 ? 56 : 24);
template <class Loop, class Hooks>
constexpr int kConsumerRegisters =
    kStartRegisters + (kStartRegisters - kOtherRegisters<Loop, Hooks>)*(kThreads - kConsumers) / kConsumers;

// What all threads of a CTA run.
template <class Loop, class Epilogue, class Hooks>
JAX_EP_FN void run_matmul(char* memory, const typename Loop::Source& source, const Epilogue& epilogue,
                          const Problem& problem, const Hooks& hooks, Part cta) {
  using Memory = typename Loop::template Memory<typename Hooks::Aux>;
  static_assert(FollowsTiles<Hooks, typename Loop::Tile>);
  static_assert(LoadsStages<typename Loop::Source, typename Loop::Tile, Hooks>);
  static_assert(ListsTiles<typename Loop::Tiles, Memory>);
  static_assert(IsAuxRole<typename Loop::AuxRole, Loop, Memory>);
  static_assert(MultipliesStages<typename Loop::Multiply, typename Loop::Source, Memory>);
  static_assert(sizeof(Memory) <= kSharedBytes, "a CTA may not have so much shared memory");
  static_assert(kConsumerRegisters<Loop, Hooks> * kConsumers + kOtherRegisters<Loop, Hooks> * (kThreads - kConsumers) ==
                    kStartRegisters * kThreads,
                "what some warps take others must give");
  static_assert(std::is_empty_v<typename Hooks::Aux> ||
                    (Loop::Multiply::kRegisters == 128 && std::is_same_v<typename Loop::AuxRole, DrawTiles>),
                "hooks take the aux warps, and registers");
  auto& shared = *reinterpret_cast<Memory*>(memory);
  open_barriers<Loop>(shared);
  const int warp = uniform(threadIdx.x / 32);
  if (warp < kConsumerWarps) {
    warpgroup_reg_alloc<kConsumerRegisters<Loop, Hooks>>();
    consume<Loop>(shared, source, epilogue, problem, hooks, cta);
  } else {
    warpgroup_reg_dealloc<kOtherRegisters<Loop, Hooks>>();
    if (warp == kConsumerWarps) {
      produce<Loop>(shared, source, problem, hooks, cta);
    } else if constexpr (!std::is_empty_v<typename Hooks::Aux>) {
      hooks.run_aux(cta);
    } else {
      Loop::AuxRole::template run<Loop>(shared, source, problem, cta, warp - kFirstAuxWarp);
    }
  }
  Loop::Tiles::close();
}

JAX_EP_FN Part this_cta() { return {static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x)}; }

// The maps are a separate parameter: TMA takes their addresses, so the compiler would reload everything in the same
// struct.
template <class Loop, class Epilogue>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    grouped_matmul_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Problem problem,
                          const __grid_constant__ GroupedMatmul product) {
  extern __shared__ __align__(1024) char memory[];
  run_matmul<Loop>(memory, typename Loop::Source(maps, product), Epilogue(maps, product), problem, NoHooks{},
                   this_cta());
}

}  // namespace jax_ep::gemm
