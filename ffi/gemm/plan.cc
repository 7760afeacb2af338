#include "gemm/plan.h"

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

// Time in columns of a tile: waves times width. Any tile waits a little for its operands, which counts more for narrow
// ones, and twice where both operands come in lines across the contraction. A wide tile is stored after it is
// multiplied, the others meanwhile: that counts the more the less is contracted.
int cost_of(const Shape& shape, const HardwareModel& model, int block_n) {
  const bool k_grouped = shape.grouping == Grouping::k_grouped;
  const int contraction = larger(k_grouped ? shape.k / shape.groups : shape.k, kBlockK);
  const int store = block_n == 256 ? model.gemm.store_columns / contraction : 0;
  const int loads = model.gemm.load_columns * (k_grouped ? 2 : 1);
  return ceil_div(tiles_of(shape, block_n), model.sms) * (block_n + store + loads);
}

}  // namespace

bool should_split(const GemmRates& rates, int block_n, int k, int tiles, int sms) {
  return block_n == 128 && k >= rates.least_split && tiles * kCluster <= sms;
}

Config plan(const Shape& shape, const HardwareModel& model) {
  if (const int tiles = tiles_of(shape, 128);
      shape.grouping != Grouping::k_grouped && should_split(model.gemm, 128, shape.k, tiles, model.sms))
    return {128, model.gemm.band, tiles * kCluster, true};
  int block_n = 256;
  if (shape.grouping == Grouping::k_grouped && cost_of(shape, model, 192) < cost_of(shape, model, block_n))
    block_n = 192;
  if (cost_of(shape, model, 128) < cost_of(shape, model, block_n)) block_n = 128;
  return plan_width(shape, model, block_n);
}

Config plan_width(const Shape& shape, const HardwareModel& model, int block_n) {
  const int pairs = ceil_div(tiles_of(shape, block_n), kCluster);
  return {block_n, model.gemm.band, smaller(pairs, model.sms / kCluster) * kCluster, false};
}

std::string Config::describe() const {
  return "tiles 128x" + std::to_string(block_n) + ", band " + std::to_string(band) + ", " + std::to_string(blocks) +
         " blocks" + (split_k ? ", two a tile" : "");
}

}  // namespace jax_ep::gemm
