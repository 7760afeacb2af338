#include "gemm/plan.h"

namespace jax_ep::gemm {
namespace {

// Rows of tiles; with groups of rows, of which only the total is known here, half a tile is lost per group.
int tile_rows(const Shape& shape) {
  return ceil_div(shape.m, kBlockM) + (shape.grouping == Grouping::rows ? shape.groups / 2 : 0);
}

int tiles_of(const Shape& shape, int block_n) {
  const int matrices = shape.grouping == Grouping::contraction ? shape.groups : 1;
  return tile_rows(shape) * ceil_div(shape.n, block_n) * matrices;
}

// Time in columns of a tile: waves times width, where narrow tiles load more per product.
int cost_of(const Shape& shape, const HardwareModel& model, int block_n) {
  return ceil_div(tiles_of(shape, block_n), model.sms) * (block_n + model.gemm.tile_columns);
}

}  // namespace

bool should_split(const GemmRates& rates, int block_n, int k, int tiles, int sms) {
  return block_n == 128 && k >= rates.least_split && tiles * kCluster <= sms;
}

Config plan(const Shape& shape, const HardwareModel& model) {
  if (const int tiles = tiles_of(shape, 128);
      shape.grouping != Grouping::contraction && should_split(model.gemm, 128, shape.k, tiles, model.sms))
    return {128, model.gemm.band, tiles * kCluster, true};
  Config config{256, model.gemm.band, 0, false};
  if (cost_of(shape, model, 128) < cost_of(shape, model, 256)) config.block_n = 128;
  const int tiles = tiles_of(shape, config.block_n);
  config.blocks = smaller(ceil_div(tiles, kCluster), model.sms / kCluster) * kCluster;
  return config;
}

std::string Config::describe() const {
  return "tiles 128x" + std::to_string(block_n) + ", band " + std::to_string(band) + ", " + std::to_string(blocks) +
         " blocks" + (split_k ? ", two a tile" : "");
}

}  // namespace jax_ep::gemm
