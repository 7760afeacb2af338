#include "gemm/config.h"

namespace jax_ep::gemm {
namespace {

constexpr int kLeastSplit = 1024;  // a contraction that is worth it
constexpr int kBand = 8;           // with 132 processors a wave covers 16 rows of tiles and about 8 columns

// Rows of tiles; with groups of rows, of which only the total is known here, half a tile is lost per group.
int tile_rows(Grouping grouping, int m, int groups) {
  return ceil_div(m, kBlockM) + (grouping == Grouping::rows ? groups / 2 : 0);
}

int tiles_of(Grouping grouping, int m, int n, int groups, int block_n) {
  return tile_rows(grouping, m, groups) * ceil_div(n, block_n) * (grouping == Grouping::contraction ? groups : 1);
}

// Time in columns of a tile: waves times width, where narrow tiles load more per product.
int cost_of(Grouping grouping, int m, int n, int groups, int processors, int block_n) {
  const int waves = ceil_div(tiles_of(grouping, m, n, groups, block_n), processors);
  return waves * (block_n + 24);
}

}  // namespace

bool should_split(int block_n, int k, int tiles, int processors) {
  return block_n == 128 && k >= kLeastSplit && tiles * kCluster <= processors;
}

Config choose_config(Grouping grouping, int m, int n, int k, int groups, int processors) {
  if (const int tiles = tiles_of(grouping, m, n, groups, 128);
      grouping != Grouping::contraction && should_split(128, k, tiles, processors))
    return {128, kBand, tiles * kCluster, true};
  Config config{256, kBand, 0, false};
  if (cost_of(grouping, m, n, groups, processors, 128) < cost_of(grouping, m, n, groups, processors, 256))
    config.block_n = 128;
  const int tiles = tiles_of(grouping, m, n, groups, config.block_n);
  config.blocks = smaller(ceil_div(tiles, kCluster), processors / kCluster) * kCluster;
  return config;
}

std::string Config::describe() const {
  return "tiles 128x" + std::to_string(block_n) + ", band " + std::to_string(band) + ", " + std::to_string(blocks) +
         " blocks" + (split_k ? ", two a tile" : "");
}

}  // namespace jax_ep::gemm
