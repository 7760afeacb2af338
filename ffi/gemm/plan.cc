#include "gemm/plan.h"

#include "gemm/row_schedule.h"

namespace jax_ep::gemm {
namespace {

// Rows of tiles; if m-grouped, where only the total is known here, half a tile is lost per group.
int tile_rows(const Shape& shape) {
  return ceil_div(shape.m, kBlockM) + (shape.grouping == Grouping::m_grouped ? shape.groups / 2 : 0);
}

int tiles_of(const Shape& shape, int block_n) {
  const int matrices = shape.grouping == Grouping::k_grouped ? shape.groups : 1;
  return tile_rows(shape) * ceil_div(shape.n, block_n) * matrices;
}

// How many columns are multiplied while a tile waits for its operands, a little, which counts more for narrow ones, and
// twice where both operands come in lines across the contraction; and while it is stored where the multiplies of no
// other hide that, which counts the more the less is contracted.
int columns_lost(const Shape& shape, bool stores_alone) {
  const bool k_grouped = shape.grouping == Grouping::k_grouped;
  const int contraction = larger(k_grouped ? shape.k / shape.groups : shape.k, kBlockK);
  return (stores_alone ? kRates.store_columns / contraction : 0) + kRates.load_columns * (k_grouped ? 2 : 1);
}

// Time in columns of a tile of kBlockM rows: waves times width.
int cost_of(const Shape& shape, int sms, int block_n) {
  return ceil_div(tiles_of(shape, block_n), sms) * (block_n + columns_lost(shape, block_n == 256));
}

// Alike, with the operands swapped: half a step of rows is lost per group, and whoever is done first takes the next
// tile.
int swapped_tiles(const Shape& shape, int columns) {
  return (ceil_div(shape.m, kMostRows) + shape.groups / 2) * ceil_div(shape.n, columns * kCluster) * kCluster;
}
int swapped_cost(const Shape& shape, int sms) {
  const int rows = shape.m + shape.groups * kRowStep / 2, columns = ceil_div(shape.n, kTileColumns);
  const int lost = columns_lost(shape, /*stores_alone=*/true);
  const int64_t all = int64_t{rows} * columns + int64_t{swapped_tiles(shape, kTileColumns)} * lost;
  return larger(static_cast<int>(all / sms), smaller(shape.m, kMostRows) + lost);
}

}  // namespace

bool should_split(int block_n, int k, int tiles, int sms) {
  return block_n == 128 && k >= kRates.least_split && tiles * kCluster <= sms;
}

Config plan(const Shape& shape, int sms) {
  const Config fixed = plan_fixed(shape, sms);
  if (shape.grouping != Grouping::m_grouped || fixed.split_k) return fixed;
  if (swapped_cost(shape, sms) >= cost_of(shape, sms, fixed.block_n)) return fixed;
  return plan_swapped(shape, sms, kTileColumns);
}

Config plan_swapped(const Shape& shape, int sms, int tile_columns) {
  const int pairs = swapped_tiles(shape, tile_columns) / kCluster;
  return {kMostRows, kRates.band, smaller(pairs, sms / kCluster) * kCluster, false, /*swap_ab=*/true};
}

Config plan_fixed(const Shape& shape, int sms) {
  if (const int tiles = tiles_of(shape, 128);
      shape.grouping != Grouping::k_grouped && should_split(128, shape.k, tiles, sms))
    return {128, kRates.band, tiles * kCluster, true};
  int block_n = 256;
  if (shape.grouping == Grouping::k_grouped && cost_of(shape, sms, 192) < cost_of(shape, sms, block_n)) block_n = 192;
  if (cost_of(shape, sms, 128) < cost_of(shape, sms, block_n)) block_n = 128;
  return plan_width(shape, sms, block_n);
}

Config plan_width(const Shape& shape, int sms, int block_n) {
  const int pairs = ceil_div(tiles_of(shape, block_n), kCluster);
  return {block_n, kRates.band, smaller(pairs, sms / kCluster) * kCluster, false};
}

std::string Config::describe() const {
  if (swap_ab)
    return "tiles of 128 columns and up to " + std::to_string(block_n) + " rows, band " + std::to_string(band) + ", " +
           std::to_string(blocks) + " blocks";
  return "tiles 128x" + std::to_string(block_n) + ", band " + std::to_string(band) + ", " + std::to_string(blocks) +
         " blocks" + (split_k ? ", two a tile" : "");
}

}  // namespace jax_ep::gemm
