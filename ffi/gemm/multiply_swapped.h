// Products whose rows are in groups, with swapped operands ("swap AB" in DeepGEMM and CUTLASS): wgmma takes 64 columns
// of the weights as its rows, and a multiple of kRowStep rows of the tokens as its columns. So a tile
// has fewer than kRowStep rows of other groups. Tiles of fixed height waste half a tile per group.
//
// A CTA has 128 columns of weights, 64 for each of two cooperative warpgroups, or 256 if weights are wide. In a gated
// product half of them are of gate. Tiles differ in height, so clusters draw them from a queue (tile_queue.h).
#pragma once

#include "gemm/multiply.h"
#include "gemm/source.h"
#include "gemm/tile_queue.h"

namespace jax_ep::gemm {

// d = the sums of a warpgroup's columns, 64 in each slab, and `rows` rows, a multiple of kRowStep from kRows to kMax.
// Returns the stage that wgmma may still read, or -1.
template <class In, int kRows, int kMax, bool kMn, int kSlabs>
JAX_EP_FN int multiply_swapped(float (&d)[kSlabs][kMax / 2], auto& shared, int rows, int k_end, auto& at, int warpgroup,
                               int lane) {
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

// The multiply step (kernel.h) with swapped operands. A warpgroup has 64 columns of the weights in each slab.
template <class In, class Weights>
struct MultiplySwapped {
  using Tiles = QueuedTiles;
  static constexpr int kSlabs = Weights::kWide ? 2 : 1, kMax = kMaxRows / kSlabs, kRegisters = kMaxRows / 2;
  static constexpr bool kPingPong = false;
  using Accumulators = float[kSlabs][kMax / 2];

  JAX_EP_FN static bool has_work(const auto& source, const Problem& problem, const RowTile& tile, int warpgroup) {
    return warpgroup * kSlabs < source.weights.slices(problem, tile) && tile.rows > 0;
  }

  template <class Source>
  JAX_EP_FN static void accumulate(Accumulators& d, auto& shared, const Source&, const Problem&, const RowTile& tile,
                                   auto& at, int warp, int lane) {
    const int k_end = stages_of<Source>(tile) * Source::stage_k(tile);
    if (k_end == 0) {
      set_zero(d);
      return;
    }
    leave_undefined(d);
    const int running =
        multiply_swapped<In, kRowStep, kMax, Weights::kMn>(d, shared, tile.rows, k_end, at, warp / kWarpgroup, lane);
    wait_multiplies<0>();
    settle(d);
    if (running >= 0) consumer_release(&shared.empty[running], lane);
  }
};

}  // namespace jax_ep::gemm
