// Grouped products of float8 rows and matrices, as in DeepGEMM. Each of the two consumer warpgroups multiplies 64 rows
// of a tile. wgmma sums over a block, 128 values of the contraction. The sum is multiplied by the scale of the row and
// the scale of the 128 x 128 weights, and added in float32.
//
// TMA, the schedule and the producer treat two float8 values as one 16-bit value. So problem.k and a tile's range count
// pairs, and a stage is a block.
#pragma once

#include "gemm/gather.h"
#include "gemm/multiply.h"

namespace jax_ep::gemm {

static_assert(kScaleBlock == 2 * kBlockK, "a stage is a block");

// The scales of a thread's sums: of its two rows, and of each 64 columns.
template <int kBlockN>
struct BlockScales {
  float rows[2], weights[kBlockN / kSlice];
};

// The scales of a thread's part of a tile: rows lane / 4 and lane / 4 + 8 of its warp's 16 rows. Rows and columns
// outside the matrices get the scales of the edge. A gathered row outside is all zeros or all NaN, so any scale will
// do.
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

// Starts d = a x b of a block.
template <int kWidth>
JAX_EP_FN void start_block(float (&d)[kWidth / 2], uint64_t a, uint64_t b) {
  begin_multiplies();
#pragma unroll
  for (int step = 0; step < kBlockK / kMultiplyK; ++step)
    multiply<Float8E4M3, kWidth, false, false>(d, a + step * kDescriptorStep<false>, b + step * kDescriptorStep<false>,
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

// The multiply step (kernel.h) of products. While one warpgroup scales, the other multiplies.
template <int kBlockN>
struct MultiplyFloat8 {
  using Tiles = FixedTiles<kBlockN>;
  using Accumulators = float[1][kBlockN / 2];
  static constexpr bool kPingPong = false;
  static constexpr int kRegisters = kBlockN;  // the sums of a tile and of a block

  JAX_EP_FN static bool has_work(const auto& /*source*/, const Problem& problem, const Tile& tile, int warpgroup) {
    return tile.row + warpgroup * kSlice < tile.row_end && tile.col < problem.n;
  }

  template <class Source>
  JAX_EP_FN static void accumulate(Accumulators& total, auto& shared, const Source& source, const Problem& problem,
                                   const Tile& tile, auto& at, int warp, int lane) {
    set_zero(total);
    const int blocks = ceil_div(tile.k_end - tile.k_begin, kBlockK);
    const TileScales<kBlockN, GathersRows<Source, Tile>> tile_scales(source.product, problem, tile, warp, lane);
    for (int block = 0; block < blocks; ++block, at.advance()) {
      const char* const stage = shared.stages[at.stage];
      float d[kBlockN / 2];
      leave_undefined(d);
      wait_barrier(&shared.full[at.stage], at.parity, "a full stage");
      start_block<kBlockN>(d, descriptor_of<false>(stage + warp / kWarpgroup * kSliceBytes),
                           descriptor_of<false>(stage + kSlicesA * kSliceBytes));
      BlockScales<kBlockN> block_scales = tile_scales.load(block);
      wait_multiplies<0>();
      settle(d);
      consumer_release(&shared.empty[at.stage], lane);
      add_block<kBlockN>(total[0], d, block_scales);
    }
  }
};

// Of a gated unit: the scales of a stage, of the tile's rows, and of its columns of gate and of up.
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

// The role of the aux warps (kernel.h) that load scales. They take turns to fill a stage, because one load takes longer
// than the multiplies of a block.
struct LoadScales {
  template <class Base>
  using Memory = GatedFloat8Memory;
  static constexpr bool kFills = true;
  static constexpr int kQueueReaders = 0, kRegisters = 24;
  JAX_EP_FN static void open(auto& /*shared*/) {}

  template <class Loop>
  JAX_EP_FN static void run(auto& shared, const auto& source, const Problem& problem, Part cta, int aux_warp) {
    constexpr int kRows = kBlockM / 32;  // of a lane
    const GroupedMatmul& product = source.product;
    const int lane = threadIdx.x % 32, blocks = problem.k / kBlockK;
    int turn = 0;
    PipelineState<GatedFloat8Memory::kStages> at;
    auto tiles = Loop::Tiles::list(shared, problem, cta);
    for (Tile tile; tiles.next(&tile);) {
      const float* const weights = weight_scales(product, problem, tile, lane % 2);
      int rows[kRows];
#pragma unroll
      for (int i = 0; i < kRows; ++i) rows[i] = smaller(tile.row + i * 32 + lane, problem.m - 1) * blocks;
      const int steps = ceil_div(tile.k_end - tile.k_begin, kBlockK);
      for (int step = 0; step < steps; ++step, at.advance()) {
        const bool is_mine = turn == aux_warp;
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
};

// total += a x b of a block, scaled, for a half of a tile's rows and the columns of a warpgroup. `row`: the first row
// of this warp. Calls done() when the stage has been read.
template <class Done>
JAX_EP_FN void add_half(float (&total)[kGatedWidth / 2], uint64_t a, uint64_t b, const StageScales& stage, int row,
                        int lane, Done done) {
  float d[kGatedWidth / 2];
  leave_undefined(d);
  start_block<kGatedWidth>(d, a, b);
  BlockScales<kGatedWidth> scales = stage.of_half(row, lane);
  wait_multiplies<0>();
  settle(d);
  done();
  add_block<kGatedWidth>(total, d, scales);
  settle(total);  // before the next multiplies: otherwise two sums of a block need registers
}

// The multiply step of gated units, for the products with gate and with up. A tile has kBlockM rows and one block of
// 128 columns of gate and of up. Each consumer warpgroup has all rows, in two halves, and 64 columns of gate and of up,
// so a thread has both products of a value. The sums of both halves and of a block fill the registers. The warpgroups
// exchange the largest magnitudes of a row in shared memory (StoreGatedFloat8).
struct MultiplyGatedFloat8 {
  using Tiles = FixedTiles<kScaleBlock>;
  using Accumulators = float[kHalves][kGatedWidth / 2];
  static constexpr bool kPingPong = false;
  static constexpr int kRegisters = 192;

  JAX_EP_FN static bool has_work(const auto& /*source*/, const Problem& problem, const Tile& tile, int /*warpgroup*/) {
    return tile.row < tile.row_end && tile.col < problem.n;
  }

  JAX_EP_FN static void accumulate(Accumulators& total, auto& shared, const auto& /*source*/, const Problem&,
                                   const Tile& tile, auto& at, int warp, int lane) {
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
};

}  // namespace jax_ep::gemm
