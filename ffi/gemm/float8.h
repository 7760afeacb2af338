// Grouped products of float8 rows and matrices: DeepGEMM's recipe. Each CTA has a tile of kBlockM rows, of which both
// consumer warpgroups multiply 64. wgmma adds up 128 of the contraction, a block; behind it the sum is scaled, by the
// scale of the row and that of the 128 x 128 weights, and added in float32.
//
// To TMA, to the schedule and to the producer two values of float8 are one of 16 bits: so problem.k and a tile's range
// count pairs, and a stage is a block.
#pragma once

#include "gemm/arguments.h"
#include "gemm/kernel.h"

namespace jax_ep::gemm {

static_assert(kFloat8Block == 2 * kBlockK, "a stage is a block");

struct Float8Scales {
  const float* rows;     // [M, K / 128]
  const float* weights;  // [groups, N / 128, K / 128]
};

// What the sums of a thread are to be multiplied by: its two rows, and each 64 columns.
template <int kBlockN>
struct BlockScales {
  float rows[2], weights[kBlockN / kSlice];
};

// Where a thread finds the scales of its part of a tile: of the rows lane / 4 and lane / 4 + 8 of its warp's 16. What
// lies outside the matrices gets scales of their edges.
template <int kBlockN>
class TileScales {
 public:
  JAX_EP_FN TileScales(const Float8Scales& scales, const Problem& problem, const Tile& tile, int warp, int lane)
      : scales_(scales) {
    const int blocks = problem.k / kBlockK, row = tile.row + warp * kOutRows + lane / 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) rows_[i] = smaller(row + i * 8, problem.m - 1) * blocks;
#pragma unroll
    for (int slice = 0; slice < kBlockN / kSlice; ++slice) {
      const int column = smaller(tile.col + slice * kSlice, problem.n - 1) / kFloat8Block;
      weights_[slice] = (tile.group * (problem.n / kFloat8Block) + column) * blocks;
    }
  }

  JAX_EP_FN BlockScales<kBlockN> load(int block) const {
    BlockScales<kBlockN> scales;
#pragma unroll
    for (int i = 0; i < 2; ++i) scales.rows[i] = load_here(scales_.rows + rows_[i] + block);
#pragma unroll
    for (int slice = 0; slice < kBlockN / kSlice; ++slice)
      scales.weights[slice] = load_here(scales_.weights + weights_[slice] + block);
    return scales;
  }

 private:
  const Float8Scales& scales_;
  int rows_[2], weights_[kBlockN / kSlice];
};

// Starts d = a x b of the stage at `at`, when it is full.
template <int kBlockN, class Memory>
JAX_EP_FN void start_block(float (&d)[kBlockN / 2], Memory& shared, const Position<Memory::kStages>& at, int warp) {
  const char* const stage = shared.stages[at.stage];
  wait_barrier(&shared.full[at.stage], at.parity, "a full stage");
  const uint64_t a = describe<false>(stage + warp / kWarpgroup * kSliceBytes);
  const uint64_t b = describe<false>(stage + kSlicesA * kSliceBytes);
  begin_multiplies();
#pragma unroll
  for (int step = 0; step < kBlockK / kMultiplyK; ++step)
    multiply<Float8E4M3, kBlockN, false, false>(d, a + step * kDescriptorStep<false>, b + step * kDescriptorStep<false>,
                                                step > 0);
  commit_multiplies();
}

// total += d, scaled. The scales are first touched here, behind the multiplies that hide their loads.
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

// A warpgroup's 64 rows of a tile. While one warpgroup scales, the other multiplies.
template <int kBlockN, class Memory>
JAX_EP_FN void accumulate_float8(float (&total)[kBlockN / 2], Memory& shared, const Problem& problem,
                                 const Float8Scales& scales, const Tile& tile, Position<Memory::kStages>& at, int warp,
                                 int lane) {
  const int blocks = ceil_div(tile.k_end - tile.k_begin, kBlockK);
  const TileScales<kBlockN> tile_scales(scales, problem, tile, warp, lane);
  for (int block = 0; block < blocks; ++block, at.advance()) {
    float d[kBlockN / 2];
    leave_undefined(d);
    start_block<kBlockN>(d, shared, at, warp);
    BlockScales<kBlockN> block_scales = tile_scales.load(block);
    wait_multiplies<0>();
    settle(d);
    release(&shared.empty[at.stage], lane);
    add_block<kBlockN>(total, d, block_scales);
  }
}

template <class Out, int kBlockN, class Memory>
__device__ void consume_float8(Memory& shared, const CUtensorMap& map, Out* out, const Problem& problem,
                               const Float8Scales& scales, Share share) {
  const int warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
  Position<Memory::kStages> at;
  Schedule schedule(problem, kBlockN, share);
  for (Tile tile; schedule.next(&tile);) {
    if (tile.row + warp / kWarpgroup * kSlice >= tile.row_end || tile.col >= problem.n) {
      skip(shared, tile.k_end - tile.k_begin, at, lane);
      continue;
    }
    float total[kBlockN / 2] = {};
    accumulate_float8<kBlockN>(total, shared, problem, scales, tile, at, warp, lane);
    store_tile<Out, kBlockN>(map, out, problem, tile, total, shared.out[warp], warp, lane);
  }
  if (lane == 0) ptx::wait_stores_written<0>();  // shared memory goes with the CTA; others look at the result
}

// `a` [M, K] and `b` [groups, N, K] map slices of pairs, `out_map` a warp's box.
template <class Out, int kBlockN>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    float8_kernel(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
                  const __grid_constant__ CUtensorMap out_map, void* out, const __grid_constant__ Problem problem,
                  const __grid_constant__ Float8Scales scales) {
  using Wanted = Registers<Nothing, 192>;  // the sums of a tile and of a block
  extern __shared__ __align__(1024) char memory[];
  auto& shared = *reinterpret_cast<SharedFor<kBlockN, NoHooks>*>(memory);
  open_pipeline(shared, kConsumerWarps);
  const int warp = uniform(threadIdx.x / 32);
  if (warp < kConsumerWarps) {
    take_registers<Wanted::kConsumer>();
    consume_float8<Out, kBlockN>(shared, out_map, static_cast<Out*>(out), problem, scales, this_share());
  } else {
    give_registers<Wanted::kOther>();
    if (warp == kConsumerWarps) produce<false>(shared, a, Columns<kBlockN, false>{b}, problem, NoHooks{}, this_share());
  }
}

}  // namespace jax_ep::gemm
