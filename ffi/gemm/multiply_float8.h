// Grouped products of float8 rows and matrices, as in DeepGEMM. Each of the two consumer warpgroups multiplies 64 rows
// of a tile. wgmma sums over a block, 128 values of the contraction. The sum is multiplied by the scale of the row and
// the scale of the 128 x 128 weights, and added in float32.
//
// TMA, the schedule and the producer treat two float8 values as one 16-bit value. So problem.k and a tile's range count
// pairs, and a stage is a block.
#pragma once

#include "gemm/multiply.h"

namespace jax_ep::gemm {

static_assert(kScaleBlock == 2 * kBlockK, "a stage is a block");

// The scales of a thread's sums: of its two rows, and of each 64 columns.
template <int kBlockN>
struct BlockScales {
  float rows[2], weights[kBlockN / kSlice];
};

// The scales of a thread's part of a tile: rows lane / 4 and lane / 4 + 8 of its warp's 16 rows. Rows and columns
// outside the matrices get the scales of the edge. Gathered rows outside are zero or NaN with any scale.
template <int kBlockN, bool kGathers>
class TileScales {
 public:
  JAX_EP_FN TileScales(const GroupedMatmul& product, const Problem& problem, const Tile& tile, int warp, int lane)
      : product_(product) {
    const int blocks = problem.k / kBlockK, row = tile.row + warp * kOutRows + lane / 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int at = smaller(row + i * 8, problem.m - 1);
      if constexpr (kGathers) at = load_here(product.indices + at);
      rows_[i] = kGathers && static_cast<uint32_t>(at) >= static_cast<uint32_t>(product.source_rows) ? -1 : at * blocks;
    }
#pragma unroll
    for (int slice = 0; slice < kBlockN / kSlice; ++slice) {
      const int column = smaller(tile.col + slice * kSlice, problem.n - 1) / kScaleBlock;
      weights_[slice] = (tile.group * (problem.n / kScaleBlock) + column) * blocks;
    }
  }

  JAX_EP_FN BlockScales<kBlockN> load(int block) const {
    BlockScales<kBlockN> scales;
#pragma unroll
    for (int i = 0; i < 2; ++i)
      scales.rows[i] = kGathers && rows_[i] < 0 ? 1 : load_here(product_.lhs_scales + rows_[i] + block);
#pragma unroll
    for (int slice = 0; slice < kBlockN / kSlice; ++slice)
      scales.weights[slice] = load_here(product_.rhs_scales + weights_[slice] + block);
    return scales;
  }

 private:
  const GroupedMatmul& product_;
  int rows_[2], weights_[kBlockN / kSlice];
};

// Waits until the stage at `at` is full, and starts d = a x b of it.
template <int kBlockN, class Memory>
JAX_EP_FN void start_block(float (&d)[kBlockN / 2], Memory& shared, const PipelineState<Memory::kStages>& at,
                           int warp) {
  const char* const stage = shared.stages[at.stage];
  wait_barrier(&shared.full[at.stage], at.parity, "a full stage");
  const uint64_t a = descriptor_of<false>(stage + warp / kWarpgroup * kSliceBytes);
  const uint64_t b = descriptor_of<false>(stage + kSlicesA * kSliceBytes);
  begin_multiplies();
#pragma unroll
  for (int step = 0; step < kBlockK / kMultiplyK; ++step)
    multiply<Float8E4M3, kBlockN, false, false>(d, a + step * kDescriptorStep<false>, b + step * kDescriptorStep<false>,
                                                step > 0);
  commit_multiplies();
}

// total += d, scaled. This is the first use of the scales, so the multiplies hide their loads.
template <int kBlockN>
JAX_EP_FN void add_block(float (&total)[kBlockN / 2], const float (&d)[kBlockN / 2], BlockScales<kBlockN>& scales) {
  settle(scales.rows);
  settle(scales.weights);
#pragma unroll
  for (int slice = 0; slice < kBlockN / kSlice; ++slice) {
    const float upper = scales.rows[0] * scales.weights[slice], lower = scales.rows[1] * scales.weights[slice];
#pragma unroll
    for (int i = 0; i < kSlice / 2; i += 4) {
      const int at = slice * kSlice / 2 + i;
      total[at] += d[at] * upper, total[at + 1] += d[at + 1] * upper;
      total[at + 2] += d[at + 2] * lower, total[at + 3] += d[at + 3] * lower;
    }
  }
}

template <class Rhs>
struct Float8Source : TileSource<false, Rhs> {
  static constexpr bool kGathers = false;
  const GroupedMatmul& product;  // has the scales

  JAX_EP_FN Float8Source(const Maps& maps, const GroupedMatmul& product)
      : TileSource<false, Rhs>(maps, product), product(product) {}
};

// Each warpgroup multiplies 64 rows of a tile. While one warpgroup scales, the other multiplies.
template <int kBlockN, class SourceOf = Float8Source<OneMatrix<kBlockN, false>>>
struct Float8Mainloop : FixedTiles<kBlockN> {
  using Source = SourceOf;
  using Accumulators = float[kBlockN / 2];
  static constexpr bool kPingPong = false;
  static constexpr int kAccumulators = 192, kProducers = 1;  // the sums of a tile and of a block

  JAX_EP_FN static bool has_work(const Source&, const Problem& problem, const Tile& tile, int warpgroup) {
    return tile.row + warpgroup * kSlice < tile.row_end && tile.col < problem.n;
  }

  template <class Shared>
  JAX_EP_FN static void accumulate(Accumulators& total, Shared& shared, const Source& source, const Problem& problem,
                                   const Tile& tile, PipelineState<Shared::kStages>& at, int warp, int lane) {
    set_zero(total);
    const int blocks = ceil_div(tile.k_end - tile.k_begin, kBlockK);
    const TileScales<kBlockN, Source::kGathers> tile_scales(source.product, problem, tile, warp, lane);
    for (int block = 0; block < blocks; ++block, at.advance()) {
      float d[kBlockN / 2];
      leave_undefined(d);
      start_block<kBlockN>(d, shared, at, warp);
      BlockScales<kBlockN> block_scales = tile_scales.load(block);
      wait_multiplies<0>();
      settle(d);
      consumer_release(&shared.empty[at.stage], lane);
      add_block<kBlockN>(total, d, block_scales);
    }
  }

  template <class Epilogue, class Shared>
  JAX_EP_FN static void store(const Epilogue& epilogue, const Accumulators& total, Shared& shared,
                              const Problem& problem, const Tile& tile, int& /*stored*/, int warp, int lane) {
    static_assert(StoresStrips<Epilogue, kBlockN>);
    epilogue.template store<kBlockN>(problem, tile, total, shared.out[warp], warp, lane);
  }
};

}  // namespace jax_ep::gemm
