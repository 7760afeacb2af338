#include "gemm/config.h"

namespace jax_ep::gemm {
namespace {

constexpr int kBandTiles = 16;   // with 132 processors a wave covers about as many rows as columns
constexpr int kTailPercent = 6;  // of the tiles may be spent on making rows even

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

Config choose_config(Grouping grouping, int m, int n, int groups, int processors) {
  Config config{256, 1, 1, kBandTiles, 0};
  if (cost_of(grouping, m, n, groups, processors, 128) < cost_of(grouping, m, n, groups, processors, 256))
    config.block_n = 128;
  const int rows = ceil_div(m, kBlockM), columns = ceil_div(n, config.block_n);
  const int tiles = tiles_of(grouping, m, n, groups, config.block_n);
  // Sharing b saves most, but makes the rows of tiles even; those of a group of rows are odd as often as not.
  if (grouping != Grouping::rows && rows > 1 && (rows % 2 == 0 || 100 <= kTailPercent * rows))
    config.cluster_m = 2;
  else if (columns % 2 == 0)
    config.cluster_n = 2;
  const int cluster = config.cluster_m * config.cluster_n;
  config.band = kBandTiles / config.cluster_m;
  config.blocks = smaller(ceil_div(tiles, cluster), processors / cluster) * cluster;
  return config;
}

std::string Config::describe() const {
  return "tiles 128x" + std::to_string(block_n) + ", clusters " + std::to_string(cluster_m) + "x" +
         std::to_string(cluster_n) + ", band " + std::to_string(band) + ", " + std::to_string(blocks) + " blocks";
}

}  // namespace jax_ep::gemm
