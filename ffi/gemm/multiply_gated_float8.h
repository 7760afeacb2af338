// Gated units of float8 operands: the products of multiply_float8.h, twice.
//
// A tile has kBlockM rows and one block of 128 columns of gate and of up. Each of the two consumer warpgroups has all
// rows and 64 columns of gate and of up, so a thread has both products of a value. The warpgroups exchange the largest
// magnitudes of a row in shared memory. While one warpgroup scales its sums, the other multiplies.
#pragma once

#include "gemm/epilogue_gated.h"
#include "gemm/multiply_float8.h"

namespace jax_ep::gemm {

// The scales of a stage: of the tile's rows, and of its columns of gate and of up.
struct StageScales {
  float rows[kBlockM], weights[2];

  // The scales of a thread's sums of a half. `row`: the first row of its warp.
  JAX_EP_FN BlockScales<kGatedWidth> of_half(int row, int lane) const {
    return {{rows[row + lane / 4], rows[row + lane / 4 + 8]}, {weights[0], weights[1]}};
  }
};

// Results have 8 bits a value and take half of `out`. `BesideResult` is in the other half.
struct GatedFloat8Memory : Shared<2 * kScaleBlock> {
  struct BesideResult {
    StageScales scales[kStages];
    uint16_t largest[2][kBlockM];  // by warpgroup and row of the tile: bits of the largest magnitude
  };

  JAX_EP_FN char* values() { return out[0][0]; }
  JAX_EP_FN BesideResult& beside_result() {
    return *reinterpret_cast<BesideResult*>(values() + kBlockM * kSwizzleBytes);
  }
  JAX_EP_FN StageScales& scales(int stage) { return beside_result().scales[stage]; }
};
static_assert(kBlockM * kSwizzleBytes + sizeof(GatedFloat8Memory::BesideResult) <= sizeof(GatedFloat8Memory::out));

JAX_EP_FN const float* weight_scales(const GroupedMatmul& x, const Problem& problem, const Tile& tile, int is_up) {
  const int column = smaller(tile.col, problem.n - 1) + (is_up ? x.second_column() : 0);
  const int64_t block = tile.group * (x.columns / kScaleBlock) + column / kScaleBlock;
  return (is_up ? x.second_rhs_scales : x.rhs_scales) + block * (problem.k / kBlockK);
}

// The aux warps take turns to load the scales of a stage, because one load takes longer than the multiplies of a block.
// `aux`: the number of the calling warp.
__device__ inline void produce_scales(GatedFloat8Memory& shared, const Problem& problem, const GroupedMatmul& product,
                                      Part cta, int aux) {
  constexpr int kRows = kBlockM / 32;  // of a lane
  const int lane = threadIdx.x % 32, blocks = problem.k / kBlockK;
  int turn = 0;
  PipelineState<GatedFloat8Memory::kStages> at;
  Schedule schedule(problem, kScaleBlock, cta);
  for (Tile tile; schedule.next(&tile);) {
    const float* const weights = weight_scales(product, problem, tile, lane % 2);
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
      for (int i = 0; i < kRows; ++i) of_rows[i] = load_here(product.lhs_scales + rows[i] + step);
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

// total += a x b of a block, scaled, for a half of a tile's rows and the columns of a warpgroup. `row`: the first row
// of this warp. Calls done() when the stage has been read.
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
  settle(total);  // before the next multiplies: otherwise two sums of a block need registers
}

// A warpgroup takes the rows of a tile in two halves: the sums of both halves and of one block fill the registers.
struct GatedFloat8Mainloop : FixedTiles<kScaleBlock> {
  using Source = Float8Source<GateAndUpBlocks>;
  template <class Aux>
  using Memory = GatedFloat8Memory;
  using Accumulators = float[kHalves][kGatedWidth / 2];
  static constexpr bool kPingPong = false;
  static constexpr int kAccumulators = 192, kProducers = 2;  // scales also arrive

  JAX_EP_FN static void assist(GatedFloat8Memory& shared, const Source& source, const Problem& problem, Part cta,
                               int aux_warp) {
    produce_scales(shared, problem, source.product, cta, aux_warp);
  }

  JAX_EP_FN static bool has_work(const Source&, const Problem& problem, const Tile& tile, int /*warpgroup*/) {
    return tile.row < tile.row_end && tile.col < problem.n;
  }

  JAX_EP_FN static void accumulate(Accumulators& total, GatedFloat8Memory& shared, const Source&, const Problem&,
                                   const Tile& tile, PipelineState<GatedFloat8Memory::kStages>& at, int warp,
                                   int lane) {
    set_zero(total);
    const int blocks = ceil_div(tile.k_end - tile.k_begin, kBlockK), row = warp % kWarpgroup * kOutRows;
    const bool has_lower = tile.row + kSlice < tile.row_end;
    for (int block = 0; block < blocks; ++block, at.advance()) {
      const char* const stage = shared.stages[at.stage];
      wait_barrier(&shared.full[at.stage], at.parity, "a full stage");
      const uint64_t a = descriptor_of<false>(stage);
      const uint64_t b = descriptor_of<false>(stage + (kSlicesA + warp / kWarpgroup * 2) * kSliceBytes);
      const auto done = [&] { consumer_release(&shared.empty[at.stage], lane); };
      add_half(total[0], a, b, shared.scales(at.stage), row, lane, [&] {
        if (!has_lower) done();
      });
      if (has_lower) add_half(total[1], a + (kSliceBytes >> 4), b, shared.scales(at.stage), kSlice + row, lane, done);
    }
  }

  template <class Epilogue>
  JAX_EP_FN static void store(const Epilogue& epilogue, const Accumulators& total, GatedFloat8Memory& shared,
                              const Problem& problem, const Tile& tile, int& /*stored*/, int warp, int lane) {
    epilogue.store(problem, tile, total, shared, warp, lane);
  }
};

}  // namespace jax_ep::gemm
