// Sources load the operands of tiles: the producer warp calls them to fill a stage.
//
// A source has (LoadsStages)
//   kTerms     the number of pairs of operands whose products add up
//   stage_k()  how much of a tile's contraction a stage holds: one block of kBlockK, or several
//   open()     says what of a tile there is to load
//   load()     fills a stage that is empty; all lanes of the warp call
// A block has the slices of the operand that wgmma takes as A, kSlicesA or those of wide weights, then the slices of
// the other operand. Sources of swapped operands also have Weights, weights and product (multiply_swapped.h). Those of
// float8 and of gathers have product. Those of gathers name what the aux warps gather (GathersRows in gather.h).
#pragma once

#include <concepts>

#include "gemm/layout.h"
#include "gemm/ptx/copies.h"
#include "gemm/ptx/warps.h"
#include "gemm/row_schedule.h"
#include "gemm/schedule.h"
#include "gemm/tensor_map.h"

namespace jax_ep::gemm {

// Loads the first `wanted` slices of an operand. The others are outside the matrix, and TMA would spend time to fill
// them with zeros. If `shared`, each CTA of the cluster loads half of the slices for both. If their number is odd, the
// CTAs load the larger half in turns. `once`: the slices are not read again.
template <bool kMn, int kSlices>
JAX_EP_FN void load_slices(char* to, const CUtensorMap& map, int row, int k, int matrix, int wanted, bool once,
                           bool shared, int cta_in_cluster, uint64_t* barrier) {
  const int of_second = kSlices % 2 ? kSlices / 2 + (k / kBlockK & 1) : kSlices / 2;  // the second CTA's first slice
  const int begin = shared && cta_in_cluster == 1 ? of_second : 0,
            end = shared && cta_in_cluster == 0 ? of_second : kSlices;
#pragma unroll
  for (int slice = 0; slice < kSlices; ++slice) {
    if (slice < begin || slice >= end || slice >= wanted) continue;
    const int first = row + slice * kSlice;
    const Corner at = kMn ? Corner{first, k, matrix} : Corner{k, first, matrix};
    if (shared)
      load_box_to(0b11, to + slice * kSliceBytes, map, at, barrier);
    else if (once)
      load_box_once(to + slice * kSliceBytes, map, at, barrier);
    else
      load_box(to + slice * kSliceBytes, map, at, barrier);
  }
}

// The number of stages of a tile. TMA pads the last stage of each term with zeros.
template <class Source>
JAX_EP_FN int stages_of(const auto& tile) {
  return Source::kTerms * ceil_div(larger(tile.k_end - tile.k_begin, 0), Source::stage_k(tile));
}

// How many slices of 64 begin before `size`; at most `most`.
JAX_EP_FN int slices_in(int size, int most) { return larger(0, smaller(ceil_div(size, kSlice), most)); }

// `full`: the barrier of the stage, which counts the bytes.
template <class Source, class Tile, class Hooks>
concept LoadsStages = requires(const Source& source, const Problem& problem, const Tile& tile, const Hooks& hooks,
                               char* stage, uint64_t* full) {
  requires Source::kTerms >= 1;
  { Source::stage_k(tile) } -> std::same_as<int>;
  source.load(stage, problem, tile, /*opened=*/source.open(problem, tile, hooks), /*term=*/0, /*k=*/0,
              /*cta_in_cluster=*/0, full);
};

// The first row of a tile's lhs, in the coordinates of `map`, which may cover only a part of the product.
struct Rows {
  const CUtensorMap& map;
  int first;
};

// The right operand of a tile of kBlockM x kBlockN: one matrix, or one per group.
template <int kBlockN, bool kMn>
struct OneMatrix {
  const CUtensorMap& map;

  JAX_EP_FN explicit OneMatrix(const CUtensorMap& map) : map(map) {}
  JAX_EP_FN OneMatrix(const Maps& maps, const GroupedMatmul&) : map(maps.rhs) {}

  // The loaded slices of 64 columns. Widths other than 192 load columns outside the matrix as zeros.
  JAX_EP_FN int slices(const Problem& problem, const Tile& tile) const {
    return kHasEdges<kBlockN> ? slices_in(problem.n - tile.col, kBlockN / kSlice) : kBlockN / kSlice;
  }
  JAX_EP_FN void load(char* to, const Problem& problem, const Tile& tile, int k, int wanted, int cta_in_cluster,
                      uint64_t* full) const {
    const int matrix = problem.grouping == Grouping::m_grouped ? tile.group : 0;
    load_slices<kMn, kBlockN / kSlice>(to, map, tile.col, k, matrix, wanted, /*once=*/problem.m <= kBlockM,
                                       tile.common == Common::rhs, cta_in_cluster, full);
  }
};

// The right operand of a gated product in float8: for each warpgroup 64 columns of gate, then 64 of up. If the CTAs of
// a cluster have the same columns, each loads half for both.
struct GateAndUpBlocks {
  const CUtensorMap &gate, &up;
  int up_column;

  JAX_EP_FN GateAndUpBlocks(const Maps& maps, const GroupedMatmul& product)
      : gate(maps.rhs), up(maps.second_rhs), up_column(product.second_column()) {}

  JAX_EP_FN int slices(const Problem& problem, const Tile& tile) const { return tile.col < problem.n ? 4 : 0; }
  JAX_EP_FN void load(char* to, const Problem& /*problem*/, const Tile& tile, int k, int wanted, int cta_in_cluster,
                      uint64_t* full) const {
    if (wanted == 0) return;
#pragma unroll
    for (int slice = 0; slice < 4; ++slice) {
      const int warpgroup = slice / 2, column = tile.col + warpgroup * kSlice;
      const CUtensorMap& map = slice % 2 == 0 ? gate : up;
      const Corner at{k, slice % 2 == 0 ? column : up_column + column, tile.group};
      if (tile.common != Common::rhs)
        load_box(to + slice * kSliceBytes, map, at, full);
      else if (warpgroup == cta_in_cluster)
        load_box_to(0b11, to + slice * kSliceBytes, map, at, full);
    }
  }
};

// Tiles of fixed height: contiguous rows of lhs, stored [k, m] if kMnA, and OneMatrix or GateAndUpBlocks.
template <bool kMnA, class Rhs>
struct TileSource {
  static constexpr int kTerms = 1;
  struct Opened {
    Rows rows;
    int lhs, rhs;  // slices with anything in them
  };

  const CUtensorMap& lhs;
  Rhs rhs;

  JAX_EP_FN static int stage_k(const Tile&) { return kBlockK; }
  JAX_EP_FN TileSource(const CUtensorMap& lhs, const CUtensorMap& rhs) : lhs(lhs), rhs(rhs) {}
  JAX_EP_FN TileSource(const Maps& maps, const GroupedMatmul& product) : lhs(maps.lhs), rhs(maps, product) {}

  JAX_EP_FN Opened open(const Problem& problem, const Tile& tile, const auto& hooks) const {
    return {hooks.before_tile(tile, lhs), slices_in(tile.row_end - tile.row, kSlicesA), rhs.slices(problem, tile)};
  }
  JAX_EP_FN void load(char* stage, const Problem& problem, const Tile& tile, const Opened& opened, int /*term*/, int k,
                      int cta_in_cluster, uint64_t* full) const {
    if (!elect_lane()) return;
    ptx::arrive_expecting(full, (opened.lhs + opened.rhs) * kSliceBytes);
    load_slices<kMnA, kSlicesA>(stage, opened.rows.map, opened.rows.first, k, 0, opened.lhs, /*once=*/false,
                                tile.common == Common::lhs, cta_in_cluster, full);
    rhs.load(stage + kSlicesA * kSliceBytes, problem, tile, k, opened.rhs, cta_in_cluster, full);
  }
};

// The same in float8.
template <class Rhs>
struct Float8Source : TileSource<false, Rhs> {
  const GroupedMatmul& product;  // has the scales

  JAX_EP_FN Float8Source(const Maps& maps, const GroupedMatmul& product)
      : TileSource<false, Rhs>(maps, product), product(product) {}
};

// The weights of a tile with swapped operands: a matrix per group, stored [k, n] if kStoredKN. A CTA has its own 128
// columns. If kWide, both CTAs of a cluster have the same 256 columns, and each loads half for both. A second term has
// second_lhs and second_rhs.
template <bool kStoredKN, bool kIsWide = false, int kPairs = 1>
struct SwappedMatrix {
  static constexpr bool kMn = kStoredKN, kWide = kIsWide;
  static constexpr int kSlices = kWide ? 2 * kSlicesA : kSlicesA, kColumns = kSlices * kSlice, kTerms = kPairs;
  const Maps& maps;
  const GroupedMatmul& product;

  // The slices of 64 columns of the tile. A warpgroup multiplies one, or two if kWide.
  JAX_EP_FN int slices(const Problem& problem, const RowTile& tile) const {
    return slices_in(problem.n - tile.col, kSlices);
  }
  JAX_EP_FN void load(char* to, const RowTile& tile, int term, int k, int slices, int cta_in_cluster,
                      uint64_t* full) const {
    load_slices<kMn, kSlices>(to, term == 0 ? maps.rhs : maps.second_rhs, tile.col, k, tile.group, slices,
                              /*once=*/false, /*shared=*/kWide, cta_in_cluster, full);
  }
};

// The weights of a gated product: 64 columns of gate, then the same columns of up, both stored [k, n]. If kWide, each
// warpgroup has its own columns. Otherwise one warpgroup multiplies gate and the other up.
template <bool kIsWide = false>
struct SwappedGateAndUp {
  static constexpr bool kMn = true, kWide = kIsWide;
  static constexpr int kPairs = kWide ? 2 : 1, kColumns = kPairs * kSlice, kTerms = 1, kSlices = 2 * kPairs;
  const Maps& maps;
  const GroupedMatmul& product;

  JAX_EP_FN int slices(const Problem& problem, const RowTile& tile) const {
    return 2 * slices_in(problem.n - tile.col, kPairs);
  }
  JAX_EP_FN void load(char* to, const RowTile& tile, int /*term*/, int k, int slices, int cta_in_cluster,
                      uint64_t* full) const {
    const int pair = kWide ? cta_in_cluster : 0, col = tile.col + pair * kSlice;
    if (2 * pair >= slices) return;
    to += 2 * pair * kSliceBytes;
    load_one(to, maps.rhs, {col, k, tile.group}, full);
    load_one(to + kSliceBytes, maps.second_rhs, {product.second_column() + col, k, tile.group}, full);
  }

 private:
  JAX_EP_FN static void load_one(char* to, const CUtensorMap& map, const Corner& at, uint64_t* full) {
    if constexpr (kWide)
      load_box_to(0b11, to, map, at, full);
    else
      load_box(to, map, at, full);
  }
};

// How much of the contraction a stage holds with swapped operands. Tiles of few rows leave room for a second block, so
// that twice as many bytes of weights are in flight.
JAX_EP_CONSTANT_FN int stage_k_of(int rows) { return rows <= kSlice ? 2 * kBlockK : kBlockK; }

// Tiles with swapped operands (multiply_swapped.h). The CTAs of a cluster have the same rows: the first CTA loads the
// first 128 for both, and the second the rest.
template <class WeightsOf>
struct SwappedSource {
  using Weights = WeightsOf;
  static_assert(!Weights::kWide, "no product of contiguous rows has wide weights");
  static constexpr int kTerms = Weights::kTerms, kColumns = Weights::kColumns;
  static constexpr int kBlockBytes = (Weights::kSlices + 1) * kSliceBytes;  // of a tile of few rows
  struct Opened {
    int weights, rows;  // slices with anything in them
  };

  const Maps& maps;
  const GroupedMatmul& product;
  Weights weights;

  JAX_EP_FN SwappedSource(const Maps& maps, const GroupedMatmul& product)
      : maps(maps), product(product), weights{maps, product} {}

  JAX_EP_FN static int stage_k(const RowTile& tile) { return stage_k_of(tile.rows); }
  JAX_EP_FN Opened open(const Problem& problem, const RowTile& tile, const auto& /*hooks*/) const {
    return {weights.slices(problem, tile), ceil_div(tile.rows, kSlice)};
  }
  JAX_EP_FN void load(char* stage, const Problem& /*problem*/, const RowTile& tile, const Opened& opened, int term,
                      int k, int cta_in_cluster, uint64_t* full) const {
    if (!elect_lane()) return;
    const int end = k + stage_k(tile);
    ptx::arrive_expecting(full, (opened.weights + opened.rows) * (end - k) / kBlockK * kSliceBytes);
    for (; k < end; k += kBlockK, stage += kBlockBytes) {
      weights.load(stage, tile, term, k, opened.weights, cta_in_cluster, full);
      load_slices<false, kMaxRows / kSlice>(stage + Weights::kSlices * kSliceBytes,
                                            term == 0 ? maps.lhs : maps.second_lhs, tile.row, k, 0, opened.rows,
                                            /*once=*/false, /*shared=*/true, cta_in_cluster, full);
    }
  }
};

// What TMA loads if rows are gathered and operands swapped: the weights. The CTAs of a cluster have the same weights
// and different rows.
template <class WeightsOf>
struct WideSource {
  using Weights = WeightsOf;
  static constexpr int kTerms = 1, kColumns = Weights::kColumns;
  static constexpr int kGatheredSlice = Weights::kSlices;  // the first in a stage

  const GroupedMatmul& product;
  Weights weights;

  JAX_EP_FN WideSource(const Maps& maps, const GroupedMatmul& product) : product(product), weights{maps, product} {}
  JAX_EP_FN static int stage_k(const RowTile&) { return kBlockK; }

  JAX_EP_FN int open(const Problem& problem, const RowTile& tile, const auto& /*hooks*/) const {
    return weights.slices(problem, tile);
  }
  JAX_EP_FN void load(char* stage, const Problem& /*problem*/, const RowTile& tile, int slices, int /*term*/, int k,
                      int cta_in_cluster, uint64_t* full) const {
    if (!elect_lane()) return;
    ptx::arrive_expecting(full, slices * kSliceBytes);
    weights.load(stage, tile, 0, k, slices, cta_in_cluster, full);
  }
  JAX_EP_FN static int rows_of(const RowTile& tile) { return tile.rows; }
};

// What TMA loads if the left operand of tiles of fixed height is gathered: the right one.
template <class Rhs>
struct RightSource {
  static constexpr int kTerms = 1, kGatheredSlice = 0;

  const GroupedMatmul& product;
  Rhs rhs;

  JAX_EP_FN RightSource(const Maps& maps, const GroupedMatmul& product) : product(product), rhs(maps, product) {}
  JAX_EP_FN static int stage_k(const Tile&) { return kBlockK; }

  JAX_EP_FN int open(const Problem& problem, const Tile& tile, const auto& /*hooks*/) const {
    return rhs.slices(problem, tile);
  }
  JAX_EP_FN void load(char* stage, const Problem& problem, const Tile& tile, int slices, int /*term*/, int k,
                      int cta_in_cluster, uint64_t* full) const {
    if (!elect_lane()) return;
    ptx::arrive_expecting(full, slices * kSliceBytes);
    rhs.load(stage + kSlicesA * kSliceBytes, problem, tile, k, slices, cta_in_cluster, full);
  }
  JAX_EP_FN static int rows_of(const Tile& tile) { return tile.row_end - tile.row; }
};

}  // namespace jax_ep::gemm
