#include "gemm/plan.h"

#include "comm/text.h"
#include "gemm/row_schedule.h"

namespace jax_ep::gemm {
namespace {

// If m-grouped, the host knows only the total, and counts half a tile more per group.
int tile_rows(const Shape& shape) {
  return ceil_div(shape.m, kBlockM) + (shape.grouping == Grouping::m_grouped ? shape.groups / 2 : 0);
}

int tiles_of(const Shape& shape, int block_n) {
  const int matrices = shape.grouping == Grouping::k_grouped ? shape.groups : 1;
  return tile_rows(shape) * ceil_div(shape.n, block_n) * matrices;
}

// The cost of filling and draining a tile, in columns of multiplies: `load_columns` for the first load (twice if
// k-grouped), plus `store_columns` divided by the contraction for the epilogue, if no other warpgroup multiplies then.
int columns_lost(const Shape& shape, bool stores_alone) {
  const bool k_grouped = shape.grouping == Grouping::k_grouped;
  const int contraction = larger(k_grouped ? shape.k / shape.groups : shape.k, kBlockK);
  return (stores_alone ? kH200ProductRates.store_columns / contraction : 0) +
         kH200ProductRates.load_columns * (k_grouped ? 2 : 1);
}

int cost_of(const Shape& shape, int sms, int block_n) {
  return ceil_div(tiles_of(shape, block_n), sms) * (block_n + columns_lost(shape, block_n == 256));
}

// The same with swapped operands. Half a step of rows is lost per group. There are no waves, because the first free
// cluster takes the next tile.
int swapped_tiles(const Shape& shape, int columns) {
  return (ceil_div(shape.m, kMaxRows) + shape.groups / 2) * ceil_div(shape.n, columns * kCluster) * kCluster;
}
int swapped_cost(const Shape& shape, int sms) {
  const int rows = shape.m + shape.groups * kRowStep / 2, columns = ceil_div(shape.n, kTileColumns);
  const int lost = columns_lost(shape, /*stores_alone=*/true);
  const int64_t all = int64_t{rows} * columns + int64_t{swapped_tiles(shape, kTileColumns)} * lost;
  return larger(static_cast<int>(all / sms), smaller(shape.m, kMaxRows) + lost);
}

Config plan_swapped(const Shape& shape, int sms, int tile_columns) {
  const int pairs = swapped_tiles(shape, tile_columns) / kCluster;
  // With so few rows the load of the weights bounds every tile.
  const bool is_static = shape.m <= shape.groups * kRowStep;
  return {kMaxRows, kH200ProductRates.band, smaller(pairs, sms / kCluster) * kCluster,
          false,    /*swap_ab=*/true,       is_static};
}

Config plan_width(const Shape& shape, int sms, int block_n) {
  const int pairs = ceil_div(tiles_of(shape, block_n), kCluster);
  return {block_n, kH200ProductRates.band, smaller(pairs, sms / kCluster) * kCluster, false};
}

}  // namespace

bool should_split(int block_n, int k, int tiles, int sms) {
  return block_n == 128 && k >= kH200ProductRates.least_split && tiles * kCluster <= sms;
}

Config plan_tiles(const Shape& shape, int sms) {
  const bool is_gated = shape.formula == Formula::gated;
  if (shape.is_float8) return plan_width(shape, sms, is_gated ? kScaleBlock : kFloat8Columns);
  const bool gathers = shape.gathered != Gathered::none;
  if (gathers && shape.grouping == Grouping::k_grouped) return plan_width(shape, sms, kGatheredColumns);
  if (gathers || shape.formula != Formula::store) return plan_swapped(shape, sms, is_gated ? kSlice : kTileColumns);
  const Config fixed = plan_fixed(shape, sms);
  if (shape.grouping != Grouping::m_grouped || fixed.split_k) return fixed;
  if (swapped_cost(shape, sms) >= cost_of(shape, sms, fixed.block_n)) return fixed;
  return plan_swapped(shape, sms, kTileColumns);
}

Config plan_fixed(const Shape& shape, int sms) {
  if (const int tiles = tiles_of(shape, 128);
      shape.grouping != Grouping::k_grouped && should_split(128, shape.k, tiles, sms))
    return {128, kH200ProductRates.band, tiles * kCluster, true};
  int block_n = 256;
  if (shape.grouping == Grouping::k_grouped && cost_of(shape, sms, 192) < cost_of(shape, sms, block_n)) block_n = 192;
  if (cost_of(shape, sms, 128) < cost_of(shape, sms, block_n)) block_n = 128;
  return plan_width(shape, sms, block_n);
}

std::string Config::describe() const {
  const std::string tiles = swap_ab ? concat("tiles of up to ", block_n, " rows") : concat("tiles 128x", block_n);
  return concat(tiles, ", band ", band, ", ", ctas, " CTAs", is_static ? ", in a fixed order" : "",
                split_k ? ", two a tile" : "");
}

}  // namespace jax_ep::gemm
