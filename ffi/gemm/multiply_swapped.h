// Products whose rows are in groups, with the operands swapped ("swap AB", as DeepGEMM and CUTLASS call it): wgmma
// takes 64 columns of the weights as its rows, and a multiple of kRowStep rows of the tokens as its columns. So a tile
// has as many rows as its group has left, where tiles of fixed height waste half of one per group.
//
// A CTA has 128 columns of weights, 64 for each of two cooperative warpgroups. Clusters take tiles off a queue
// (tile_queue.h), as tiles differ in height.
#pragma once

#include "gemm/epilogue.h"
#include "gemm/multiply.h"
#include "gemm/tile_queue.h"

namespace jax_ep::gemm {

// d = the sums of a warpgroup's 64 columns and `rows` rows, a multiple of kRowStep and at least kRows. Returns the
// stage that wgmma may still read, or -1.
template <class In, int kRows, bool kMn, int kCount>
JAX_EP_FN int multiply_rows(float (&d)[1][kCount], SwappedMemory& shared, int rows, int k_end,
                            Position<SwappedMemory::kStages>& at, int warpgroup, int lane) {
  if constexpr (kRows > kMostRows) {
    return -1;
  } else {
    if (rows > kRows) return multiply_rows<In, kRows + kRowStep, kMn>(d, shared, rows, k_end, at, warpgroup, lane);
    return multiply_stages<In, kRows, 1, kMn, false>(d, shared, 0, k_end, at, warpgroup, lane);
  }
}

// The weights of a tile are SwappedMatrix or SwappedGateAndUp.
template <class In, class Weights>
struct SwappedMainloop {
  using Source = SwappedSource<Weights>;
  using Tile = RowTile;
  template <class Aux>
  using Memory = SwappedMemory;
  using Sums = float[1][kMostRows / 2];
  static constexpr bool kPingPong = false;
  static constexpr int kAccumulators = kMostRows / 2, kProducers = 1;

  JAX_EP_FN static void open(SwappedMemory& shared) {
    if (threadIdx.x == 0) open_queue(shared.queue);
  }
  JAX_EP_FN static void close() { sync_cluster(); }  // until nobody arrives at barriers of the other CTA
  JAX_EP_FN static TakenTiles tiles(SwappedMemory& shared, const Problem& problem, Share) {
    return TakenTiles(shared.queue, problem, Source::kColumns);
  }
  JAX_EP_FN static void assist(SwappedMemory& shared, const Source& source, const Problem& problem, Share,
                               int aux_warp) {
    if (aux_warp == 0 && blockIdx.x % kCluster == 0)
      take_tiles(shared.queue, problem, Source::kColumns, source.product.counter, threadIdx.x % 32);
  }

  JAX_EP_FN static bool has_work(const Source& source, const Problem& problem, const Tile& tile, int warpgroup) {
    return warpgroup < source.weights.slices(problem, tile);
  }

  JAX_EP_FN static void accumulate(Sums& d, SwappedMemory& shared, const Source&, const Problem&, const Tile& tile,
                                   Position<SwappedMemory::kStages>& at, int warp, int lane) {
    const int k_end = stages_of<Source>(tile) * kBlockK;
    if (k_end == 0) {
#pragma unroll
      for (float& value : d[0]) value = 0;
      return;
    }
    leave_undefined(d[0]);
    const int running =
        multiply_rows<In, kRowStep, Weights::kMn>(d, shared, tile.rows, k_end, at, warp / kWarpgroup, lane);
    wait_multiplies<0>();
    settle(d[0]);
    if (running >= 0) release(&shared.empty[running], lane);
  }

  template <class Epilogue>
  JAX_EP_FN static void store(const Epilogue& epilogue, const Sums& d, SwappedMemory& shared, const Problem& problem,
                              const Tile& tile, int& chunks, int warp, int lane) {
    epilogue.store(problem, tile, d[0], shared, chunks, warp, lane);
  }
};

}  // namespace jax_ep::gemm
