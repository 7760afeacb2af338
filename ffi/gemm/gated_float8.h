// Gated units of float8 operands, quantized where they are made: activation(rows x gate) * (rows x up), with a scale
// per row and block of columns. The products are those of float8.h, rounded to bfloat16 before the activation.
//
// A tile has kBlockM rows and one block of kFloat8Block columns. Each of the two consumer warpgroups has all of its
// rows and 64 of its columns, of gate and of up: so a thread has both products of a value, and what makes the scale of
// a row meets in shared memory. While one warpgroup scales its sums, the other multiplies.
#pragma once

#include <cuda_bf16.h>

#include "comm/float8.h"
#include "gemm/activation.h"
#include "gemm/float8.h"
#include "gemm/ptx/arithmetic.h"

namespace jax_ep::gemm {

constexpr int kGatedWidth = 2 * kSlice;  // columns that a warpgroup multiplies: 64 of gate and as many of up
constexpr int kHalves = kBlockM / kSlice;

// The scales of a stage: of the tile's rows, and of its columns of gate and of up.
struct StageScales {
  float rows[kBlockM], weights[2];

  // What a thread's sums of a half are to be multiplied by; `row`: its warp's first.
  JAX_EP_FN BlockScales<kGatedWidth> of_half(int row, int lane) const {
    return {{rows[row + lane / 4], rows[row + lane / 4 + 8]}, {weights[0], weights[1]}};
  }
};

// A result of 8 bits a value takes half of `out`; what more is kept has the other half.
struct GatedFloat8Memory : Shared<2 * kFloat8Block> {
  struct More {
    StageScales scales[kStages];
    uint16_t largest[2][kBlockM];  // by warpgroup and row of the tile: bits of the largest magnitude
  };

  JAX_EP_FN char* staged() { return out[0][0]; }
  JAX_EP_FN More& more() { return *reinterpret_cast<More*>(staged() + kBlockM * kLineBytes); }
  JAX_EP_FN StageScales& scales(int stage) { return more().scales[stage]; }
};
static_assert(kBlockM * kLineBytes + sizeof(GatedFloat8Memory::More) <= sizeof(GatedFloat8Memory::out));

// Both of every group are stored [n, k], and so are their scales, a block each; those of up begin behind `up_column`
// columns.
struct GatedFloat8Scales {
  const float *rows, *gate, *up;
  int columns, up_column;  // of each matrix

  // Where those of a tile's columns of gate begin, or of up.
  JAX_EP_FN const float* of_tile(const Problem& problem, const Tile& tile, int is_up) const {
    const int column = smaller(tile.col, problem.n - 1) + (is_up ? up_column : 0);
    const int64_t block = tile.group * (columns / kFloat8Block) + column / kFloat8Block;
    return (is_up ? up : gate) + block * (problem.k / kBlockK);
  }
};

// The right operands, as `produce` loads them: for each warpgroup 64 columns of gate, then those of up. Both CTAs of a
// cluster load half of them where they share the columns.
struct ColumnsOfBoth {
  static constexpr int kColumns = kFloat8Block;
  const CUtensorMap &gate, &up;
  int up_column;

  JAX_EP_FN int slices(const Problem& problem, const Tile& tile) const { return tile.col < problem.n ? 4 : 0; }
  JAX_EP_FN void load(char* to, const Problem& /*problem*/, const Tile& tile, int k, int wanted, int rank,
                      uint64_t* full) const {
    if (wanted == 0) return;
#pragma unroll
    for (int slice = 0; slice < 4; ++slice) {
      const int warpgroup = slice / 2, column = tile.col + warpgroup * kSlice;
      const CUtensorMap& map = slice % 2 == 0 ? gate : up;
      const Corner at{k, slice % 2 == 0 ? column : up_column + column, tile.group};
      if (tile.common != Common::b)
        load_box(to + slice * kSliceBytes, map, at, full);
      else if (warpgroup == rank)
        load_box_to(0b11, to + slice * kSliceBytes, map, at, full);
    }
  }
};

// The aux warps bring the scales of the stages in turns: the way to memory takes longer than the multiplies of a block.
// `aux`: which of them calls.
__device__ inline void produce_scales(GatedFloat8Memory& shared, const Problem& problem,
                                      const GatedFloat8Scales& scales, Share share, int aux) {
  constexpr int kRows = kBlockM / 32;  // of a lane
  const int lane = threadIdx.x % 32, blocks = problem.k / kBlockK;
  int turn = 0;
  Position<GatedFloat8Memory::kStages> at;
  Schedule schedule(problem, kFloat8Block, share);
  for (Tile tile; schedule.next(&tile);) {
    const float* const weights = scales.of_tile(problem, tile, lane % 2);
    int rows[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) rows[i] = smaller(tile.row + i * 32 + lane, problem.m - 1) * blocks;
    const int steps = ceil_div(tile.k_end - tile.k_begin, kBlockK);
    for (int step = 0; step < steps; ++step, at.advance()) {
      const bool is_mine = turn == aux;
      turn = turn + 1 == kAuxWarps ? 0 : turn + 1;
      if (!is_mine) continue;
      float of_rows[kRows];
#pragma unroll
      for (int i = 0; i < kRows; ++i) of_rows[i] = load_here(scales.rows + rows[i] + step);
      const float of_weights = load_here(weights + step);
      wait_barrier(&shared.empty[at.stage], at.parity ^ 1, "an empty stage for scales");
      StageScales& stage = shared.scales(at.stage);
#pragma unroll
      for (int i = 0; i < kRows; ++i) stage.rows[i * 32 + lane] = of_rows[i];
      if (lane < 2) stage.weights[lane] = of_weights;
      __syncwarp();
      if (lane == 0) ptx::arrive(&shared.full[at.stage]);
    }
  }
}

// total += a x b of a block, scaled: a half of a tile's rows, of which a warp's begin at `row`, times the columns of a
// warpgroup. Calls done() when nothing reads the stage any more.
template <class Done>
JAX_EP_FN void add_half(float (&total)[kGatedWidth / 2], uint64_t a, uint64_t b, const StageScales& stage, int row,
                        int lane, Done done) {
  float d[kGatedWidth / 2];
  leave_undefined(d);
  begin_multiplies();
#pragma unroll
  for (int step = 0; step < kBlockK / kMultiplyK; ++step)
    multiply<Float8E4M3, kGatedWidth, false, false>(d, a + step * kDescriptorStep<false>,
                                                    b + step * kDescriptorStep<false>, step > 0);
  commit_multiplies();
  BlockScales<kGatedWidth> scales = stage.of_half(row, lane);
  wait_multiplies<0>();
  settle(d);
  done();
  add_block<kGatedWidth>(total, d, scales);
  settle(total);  // before the next multiplies begin, or there would have to be registers for two sums of a block
}

// A warpgroup's columns of a tile, by halves of its rows.
JAX_EP_FN void accumulate_gated_float8(float (&upper)[kGatedWidth / 2], float (&lower)[kGatedWidth / 2],
                                       GatedFloat8Memory& shared, const Tile& tile,
                                       Position<GatedFloat8Memory::kStages>& at, int warp, int lane) {
  const int blocks = ceil_div(tile.k_end - tile.k_begin, kBlockK), row = warp % kWarpgroup * kOutRows;
  const bool has_lower = tile.row + kSlice < tile.row_end;
  for (int block = 0; block < blocks; ++block, at.advance()) {
    const char* const stage = shared.stages[at.stage];
    wait_barrier(&shared.full[at.stage], at.parity, "a full stage");
    const uint64_t a = describe<false>(stage);
    const uint64_t b = describe<false>(stage + (kSlicesA + warp / kWarpgroup * 2) * kSliceBytes);
    const auto done = [&] { release(&shared.empty[at.stage], lane); };
    add_half(upper, a, b, shared.scales(at.stage), row, lane, [&] {
      if (!has_lower) done();
    });
    if (has_lower) add_half(lower, a + (kSliceBytes >> 4), b, shared.scales(at.stage), kSlice + row, lane, done);
  }
}

// What a thread has of a half: for its two rows pairs of columns, of which neighbouring lanes have the next.
struct GatedPairs {
  static constexpr int kPairs = kSlice / 8;
  __nv_bfloat162 pairs[2][kPairs];

  template <Activation kActivation>
  JAX_EP_FN void activate_products(const float (&total)[kGatedWidth / 2]) {
#pragma unroll
    for (int i = 0; i < 2 * kPairs; ++i) {
      const int gate = 2 * i, up = gate + kSlice / 2;
      pairs[i % 2][i / 2] = __hmul2(activate<kActivation>(__floats2bfloat162_rn(total[gate], total[gate + 1])),
                                    __floats2bfloat162_rn(total[up], total[up + 1]));
    }
  }
  // The bits of the largest magnitude in the warp's columns of a row: that of a NaN is larger than all. The four lanes
  // that share a row call together.
  JAX_EP_FN uint32_t largest(int row) const {
    uint32_t both = 0;
#pragma unroll
    for (int i = 0; i < kPairs; ++i)
      both = __vmaxu2(both, reinterpret_cast<const uint32_t&>(pairs[row][i]) & 0x7fff7fffu);
    uint32_t most = larger(static_cast<int>(both & 0xffff), static_cast<int>(both >> 16));
    most = max(most, __shfl_xor_sync(~0u, most, 1));
    return max(most, __shfl_xor_sync(~0u, most, 2));
  }
};

// The result of a gated unit in float8.
struct GatedFloat8Result {
  char* values;   // [M, N]
  float* scales;  // [M, N / 128]
};

// The consumers of a CTA call together. Between their first and their second meeting a row's scale is read, and its
// values are staged; so neither is overwritten while others read.
template <Activation kActivation>
JAX_EP_FN void store_gated_float8(const GatedFloat8Result& out, const Problem& problem, const Tile& tile,
                                  const float (&upper)[kGatedWidth / 2], const float (&lower)[kGatedWidth / 2],
                                  GatedFloat8Memory& shared, int warp, int lane) {
  const int warpgroup = warp / kWarpgroup, first = warp % kWarpgroup * kOutRows + lane / 4;
  char* const staged = shared.staged();
  GatedPairs made[kHalves];
  made[0].activate_products<kActivation>(upper);
  made[1].activate_products<kActivation>(lower);
#pragma unroll
  for (int i = 0; i < 2 * kHalves; ++i) {
    const uint32_t largest = made[i / 2].largest(i % 2);
    if (lane % 4 == 0)
      shared.more().largest[warpgroup][i / 2 * kSlice + first + i % 2 * 8] = static_cast<uint16_t>(largest);
  }
  ptx::sync_some(1, kConsumers);
#pragma unroll
  for (int i = 0; i < 2 * kHalves; ++i) {
    const int line = i / 2 * kSlice + first + i % 2 * 8, row = tile.row + line;
    const uint32_t bits = max(uint32_t{shared.more().largest[0][line]}, uint32_t{shared.more().largest[1][line]});
    const float largest = __uint_as_float(bits << 16);
    const float factor = factor_for(largest);
    if (warpgroup == 0 && lane % 4 == 0 && row < tile.row_end)
      out.scales[int64_t{row} * (problem.n / kFloat8Block) + tile.col / kFloat8Block] = scale_for(largest);
#pragma unroll
    for (int pair = 0; pair < GatedPairs::kPairs; ++pair) {
      const int column = warpgroup * kSlice + pair * 8 + lane % 4 * 2;
      *reinterpret_cast<uint16_t*>(staged + swizzled(line, column / 16) + column % 16) =
          scaled_to_float8(made[i / 2].pairs[i % 2][pair], factor);
    }
  }
  ptx::sync_some(1, kConsumers);
  const int line = warp * kOutRows, row = tile.row + line;
  if (row < tile.row_end)
    store_lines(out.values + int64_t{row} * problem.n + tile.col, problem.n, tile.row_end - row, kFloat8Block / 16,
                staged + line * kLineBytes, lane);
}

template <Activation kActivation>
__device__ void consume_gated_float8(GatedFloat8Memory& shared, const GatedFloat8Result& out, const Problem& problem,
                                     Share share) {
  const int warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
  Position<GatedFloat8Memory::kStages> at;
  Schedule schedule(problem, kFloat8Block, share);
  for (Tile tile; schedule.next(&tile);) {
    if (tile.row >= tile.row_end || tile.col >= problem.n) {
      skip(shared, tile.k_end - tile.k_begin, at, lane);
      continue;
    }
    float upper[kGatedWidth / 2] = {}, lower[kGatedWidth / 2] = {};
    accumulate_gated_float8(upper, lower, shared, tile, at, warp, lane);
    store_gated_float8<kActivation>(out, problem, tile, upper, lower, shared, warp, lane);
  }
}

// `rows` [M, K], `gate` and `up` [groups, .., K] map slices of pairs.
template <Activation kActivation>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    gated_float8_kernel(const __grid_constant__ CUtensorMap rows, const __grid_constant__ CUtensorMap gate,
                        const __grid_constant__ CUtensorMap up, const __grid_constant__ GatedFloat8Result out,
                        const __grid_constant__ Problem problem, const __grid_constant__ GatedFloat8Scales scales) {
  using Wanted = Registers<Nothing, 192>;  // the sums of a tile and of a block
  extern __shared__ __align__(1024) char memory[];
  auto& shared = *reinterpret_cast<GatedFloat8Memory*>(memory);
  open_pipeline(shared, kConsumerWarps, /*producers=*/2);
  const int warp = uniform(threadIdx.x / 32);
  if (warp < kConsumerWarps) {
    take_registers<Wanted::kConsumer>();
    consume_gated_float8<kActivation>(shared, out, problem, this_share());
  } else {
    give_registers<Wanted::kOther>();
    if (warp == kConsumerWarps)
      produce<false>(shared, rows, ColumnsOfBoth{gate, up, scales.up_column}, problem, NoHooks{}, this_share());
    if (warp >= kFirstAuxWarp) produce_scales(shared, problem, scales, this_share(), warp - kFirstAuxWarp);
  }
}

}  // namespace jax_ep::gemm
