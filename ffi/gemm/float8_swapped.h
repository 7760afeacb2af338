// Grouped products of float8 rows and matrices with the operands swapped (swap_ab.h): tiles have no more rows than they
// need. As in float8.h wgmma adds up a block of the contraction, and the sum is scaled and added in float32; by the
// same factors in the same order, so the results have the same bits.
//
// A warpgroup has 64 columns of weights, which share a scale, and up to 192 rows with one each. Every thread needs the
// scales of a quarter of the rows, so its warpgroup leaves them in shared memory, times that of the weights.
#pragma once

#include "gemm/float8.h"
#include "gemm/swap_ab.h"

namespace jax_ep::gemm {

// Factors of a block's sums, twice in turns. Thread lane % 4 of a wgmma has rows 2 (lane % 4) and the next one of each
// 8: they lie together, in lines that begin in banks of their own.
struct RowScales {
  static constexpr int kRows = kFloat8Rows, kLine = kRows / 4 + 4;
  float of[kConsumerWarps / kWarpgroup][2][4 * kLine];

  static JAX_EP_FN int place(int row) { return row % 8 / 2 * kLine + row / 8 * 2 + row % 2; }
};

// Where a thread finds the scales that it leaves for its warpgroup: of the weights, and of two rows of the tile. Rows
// outside the matrix get those of its last.
class SwappedScales {
 public:
  static constexpr int kStride = kWarpgroup * 32;  // from its first row to the other

  JAX_EP_FN SwappedScales(const Float8Scales& scales, const Problem& problem, const RowTile& tile, int warpgroup,
                          int thread)
      : scales_(scales) {
    const int blocks = problem.k / kBlockK;
    const int column = smaller(tile.col + warpgroup * kSlice, problem.n - 1) / kFloat8Block;
    weights_ = (tile.group * (problem.n / kFloat8Block) + column) * blocks;
    for (int i = 0; i < 2; ++i) rows_[i] = smaller(tile.row + thread + i * kStride, problem.m - 1) * blocks;
  }

  JAX_EP_FN void load(float (&factors)[3], int block) const {
    factors[0] = load_here(scales_.rows + rows_[0] + block);
    factors[1] = load_here(scales_.rows + rows_[1] + block);
    factors[2] = load_here(scales_.weights + weights_ + block);
  }

 private:
  const Float8Scales& scales_;
  int rows_[2], weights_;
};

// total += d, scaled, of kHeight rows.
template <int kHeight, int kCount>
JAX_EP_FN void add_rows(float (&total)[kCount], const float (&d)[kHeight / 2], const float* factors) {
#pragma unroll
  for (int i = 0; i < kHeight / 2; i += 8) {
    const float4 of = *reinterpret_cast<const float4*>(factors + i / 2);
    total[i] += d[i] * of.x, total[i + 1] += d[i + 1] * of.y;
    total[i + 2] += d[i + 2] * of.x, total[i + 3] += d[i + 3] * of.y;
    total[i + 4] += d[i + 4] * of.z, total[i + 5] += d[i + 5] * of.w;
    total[i + 6] += d[i + 6] * of.z, total[i + 7] += d[i + 7] * of.w;
  }
}

// Sums of a tile, and of a block beside them.
struct Float8Sums {
  static constexpr int kRows = RowScales::kRows, kAccumulators = kRows;
  using Memory = SwapMemory<kRows, RowScales>;
  using At = Position<Memory::kStages>;
  const Float8Scales& scales;
  int blocks = 0;  // of all tiles

  JAX_EP_FN void operator()(float (&total)[1][kRows / 2], Memory& shared, const Problem& problem, const RowTile& tile,
                            At& at, int warp, int lane) {
#pragma unroll
    for (float& value : total[0]) value = 0;
    if (tile.k_end > 0) add_blocks<kRowStep>(total[0], shared, problem, tile, at, warp, lane);
  }

 private:
  // Of kHeight rows, if these are as many as the tile has. A buffer of factors is filled again two blocks later: then
  // all threads of the warpgroup have met in between, so nobody reads it any more.
  template <int kHeight>
  JAX_EP_FN void add_blocks(float (&total)[kRows / 2], Memory& shared, const Problem& problem, const RowTile& tile,
                            At& at, int warp, int lane) {
    if constexpr (kHeight <= kRows) {
      if (tile.rows > kHeight) return add_blocks<kHeight + kRowStep>(total, shared, problem, tile, at, warp, lane);
      const int warpgroup = warp / kWarpgroup, thread = threadIdx.x % SwappedScales::kStride;
      const int count = tile.k_end / kBlockK, place = RowScales::place(thread);
      const SwappedScales tile_scales(scales, problem, tile, warpgroup, thread);
      float factors[3];
      tile_scales.load(factors, 0);
      for (int block = 0; block < count; ++block, at.advance()) {
        float d[kHeight / 2];
        leave_undefined(d);
        start_block<kHeight>(d, shared, at, warp);
        float* const buffer = shared.extra.of[warpgroup][blocks++ % 2];
        settle(factors);
        buffer[place] = factors[0] * factors[2];
        if (kHeight > SwappedScales::kStride && thread < kRows - SwappedScales::kStride)
          buffer[place + SwappedScales::kStride / 8 * 2] = factors[1] * factors[2];
        tile_scales.load(factors, smaller(block + 1, count - 1));
        ptx::sync_some(1 + warpgroup, kWarpgroup * 32);
        wait_multiplies<0>();
        settle(d);
        release(&shared.empty[at.stage], lane);
        add_rows<kHeight>(total, d, buffer + lane % 4 * RowScales::kLine);
      }
    }
  }
};

// `rows` [M, K] and `weights` [groups, N, K] map slices of pairs, `out_map` a warp's box; `counter` is zero.
template <class Out>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    float8_swapped_kernel(const __grid_constant__ CUtensorMap rows, const __grid_constant__ CUtensorMap weights,
                          const __grid_constant__ CUtensorMap out_map, void* out, uint32_t* counter,
                          const __grid_constant__ Problem problem, const __grid_constant__ Float8Scales scales) {
  extern __shared__ __align__(1024) char memory[];
  multiply_swapped(memory, rows, OneMatrix<false>{weights}, Float8Sums{scales},
                   StoreSums<Out>{out_map, static_cast<Out*>(out)}, counter, problem);
}

}  // namespace jax_ep::gemm
