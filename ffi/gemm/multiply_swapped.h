// Products whose rows are in groups, with swapped operands ("swap AB" in DeepGEMM and CUTLASS): wgmma takes 64 columns
// of the weights as its rows, and a multiple of kRowStep rows of the tokens as its columns. So a tile has only rows of
// its group. Tiles of fixed height waste half a tile per group.
//
// A CTA has 128 columns of weights, 64 for each of two cooperative warpgroups. Tiles differ in height, so clusters draw
// them from a queue (tile_queue.h).
#pragma once

#include "gemm/epilogue.h"
#include "gemm/multiply.h"
#include "gemm/tile_queue.h"

namespace jax_ep::gemm {

// d = the sums of a warpgroup's columns, 64 in each slab, and `rows` rows, a multiple of kRowStep from kRows to kMax.
// Returns the stage that wgmma may still read, or -1.
template <class In, int kRows, int kMax, bool kMn, int kSlabs>
JAX_EP_FN int multiply_swapped(float (&d)[kSlabs][kMax / 2], SwappedMemory& shared, int rows, int k_end,
                               PipelineState<SwappedMemory::kStages>& at, int warpgroup, int lane) {
  if constexpr (kRows > kMax) {
    return -1;
  } else {
    if (rows > kRows)
      return multiply_swapped<In, kRows + kRowStep, kMax, kMn>(d, shared, rows, k_end, at, warpgroup, lane);
    constexpr int kBlocks = kSlabs == 1 ? stage_k_of(kRows) / kBlockK : 1;
    return multiply_stages<In, kRows, kSlabs, kMn, false, kSlabs * kConsumerWarps / kWarpgroup, kBlocks>(
        d, shared, 0, k_end, at, warpgroup * kSlabs, lane);
  }
}

template <class In, class SourceOf>
struct SwappedMainloop {
  using Source = SourceOf;
  static constexpr int kSlabs = Source::Weights::kWide ? 2 : 1;
  using Tile = RowTile;
  template <class Aux>
  using Memory = SwappedMemory;
  static constexpr int kMax = kMaxRows / kSlabs;
  using Accumulators = float[kSlabs][kMax / 2];
  static constexpr bool kPingPong = false, kGathers = false, kSplitsRows = kSlabs > 1;
  static constexpr int kAccumulators = kMaxRows / 2, kProducers = 1;

  JAX_EP_FN static void open(SwappedMemory& shared) {
    if (threadIdx.x == 0) open_queue(shared.queue, kConsumerWarps + 1);
  }
  JAX_EP_FN static void close() { sync_cluster(); }  // the other CTA may still arrive at this one's barriers
  JAX_EP_FN static TakenTiles tiles(SwappedMemory& shared, const Problem&, Part) { return TakenTiles(shared.queue); }
  JAX_EP_FN static TileTaker taker(SwappedMemory& shared, const Source& source, const Problem& problem) {
    return TileTaker(shared.queue, problem, Source::kColumns, kSplitsRows, source.product.counter);
  }
  JAX_EP_FN static void assist(SwappedMemory& shared, const Source& source, const Problem& problem, Part,
                               int aux_warp) {
    if (aux_warp != 0 || blockIdx.x % kCluster != 0) return;
    for (TileTaker all = taker(shared, source, problem); all.take();) {
    }
  }

  JAX_EP_FN static bool has_work(const Source& source, const Problem& problem, const Tile& tile, int warpgroup) {
    return warpgroup * kSlabs < source.weights.slices(problem, tile) && tile.rows > 0;
  }

  JAX_EP_FN static void accumulate(Accumulators& d, SwappedMemory& shared, const Source&, const Problem&,
                                   const Tile& tile, PipelineState<SwappedMemory::kStages>& at, int warp, int lane) {
    const int k_end = stages_of<Source>(tile) * Source::stage_k(tile);
    if (k_end == 0) {
      set_zero(d);
      return;
    }
    leave_undefined(d);
    const int running = multiply_swapped<In, kRowStep, kMax, Source::Weights::kMn>(d, shared, tile.rows, k_end, at,
                                                                                   warp / kWarpgroup, lane);
    wait_multiplies<0>();
    settle(d);
    if (running >= 0) consumer_release(&shared.empty[running], lane);
  }

  template <class Epilogue>
  JAX_EP_FN static void store(const Epilogue& epilogue, Accumulators& d, SwappedMemory& shared, const Problem& problem,
                              const Tile& tile, int& stored, int warp, int lane) {
    static_assert(StoresTiles<Epilogue, Accumulators, SwappedMemory>);
    epilogue.store(problem, tile, d, shared, stored, warp, lane);
  }
};

}  // namespace jax_ep::gemm
