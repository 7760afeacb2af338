// How a matmul_all_reduce or matmul_reduce_scatter is laid over the SMs.
#include <algorithm>

#include "comm/integers.h"
#include "gemm/plan.h"
#include "kernels/matmul/plan.h"

namespace jax_ep::plans {
namespace {

double pushed_bytes(const ProductShape& shape) {
  return 1.0 * shape.m * shape.n * shape.value_bytes * (shape.op == OpKind::matmul_all_reduce ? 1 : 0.5);
}

// The plan for two ranks that exchange: all blocks multiply, and push what they have.
OverlapConfig exchange_with(const ProductShape& shape, const HardwareModel& model, int block_n) {
  const ExchangeRates& rates = model.exchange;
  const bool is_narrow = block_n == 128;
  const int rows = ceil_div(shape.m, kTileRows), columns = ceil_div(shape.n, block_n);
  const int most = model.sms - rates.spare_sms;
  OverlapConfig config{};
  config.block_n = block_n;
  config.split_k = gemm::should_split(model.gemm, block_n, shape.k, rows * columns, most);
  const int shares = rows * columns * (config.split_k ? 2 : 1);
  config.multiplying = std::min(most, shares + 1) / 2 * 2;
  config.band =
      is_narrow ? std::clamp(config.multiplying / columns / 2, 1, model.reduce.most_pairs) : ceil_div(rows, 2);
  const double rate = model.reduce.flops_per_us * (is_narrow ? model.reduce.narrow : 1) * (config.split_k ? 2 : 1);
  const double wave =
      2.0 * kTileRows * block_n * shape.k / rate + (is_narrow ? rates.ping_pong_us : model.reduce.tile_us);
  config.microseconds = ceil_div(shares, config.multiplying) * wave + rates.once_us +
                        pushed_bytes(shape) / rates.pushed_per_us * (is_narrow ? rates.narrow_exposed : rates.exposed);
  return config;
}

// How many blocks fetch and sum; the others are free after the product. Where sums are pushed while tiles are still
// computed, fewer do.
int communicating_blocks(const ProductShape& shape, const HardwareModel& model, int tiles) {
  const int most = std::max(model.sms * 3 / 4 / 2 * 2, 2);
  const bool pushes = shape.op == OpKind::matmul_all_reduce && tiles > model.sms;
  return pushes ? pushing_blocks(model.reduce.most_pushing, shape.ranks, most) : most;
}

}  // namespace

OverlapConfig reduce_with(const ProductShape& shape, const HardwareModel& model, int block_n, int communicating) {
  if (communicating == 0) return exchange_with(shape, model, block_n);
  const ReduceRates& rates = model.reduce;
  const int rows = ceil_div(shape.m, kTileRows), columns = ceil_div(shape.n, block_n), tiles = rows * columns;
  OverlapConfig config{};
  config.block_n = block_n;
  config.communicating = communicating;
  // Few tiles: two SMs take one, half of the contraction each.
  config.split_k = gemm::should_split(model.gemm, block_n, shape.k, tiles, model.sms);
  const int parts = config.split_k ? 2 : 1;
  config.multiplying = std::min(model.sms, parts * tiles + 1) / 2 * 2;
  // Whole rows of tiles are announced: a wave should finish some, or, where there are many, many waves.
  config.band =
      std::clamp(std::max(config.multiplying / columns / 2, rows / 2 / rates.least_bands), 1, rates.most_pairs);
  const int waves = ceil_div(parts * tiles, config.multiplying);
  const double rate = rates.flops_per_us * (block_n == 128 ? rates.narrow : 1);
  const double wave = 2.0 * kTileRows * block_n * shape.k / rate / parts + rates.tile_us;
  // Each rank fetches what it sums, and sends the sums. What the last wave makes can move only after it.
  const int times = shape.op == OpKind::matmul_all_reduce ? 2 : 1;
  const double moving = 1.0 * shape.m * shape.n * shape.value_bytes * times * (shape.ranks - 1) / shape.ranks;
  const double last = moving * (1 - 1.0 * (waves - 1) * config.multiplying / (parts * tiles));
  config.microseconds =
      std::max(waves * wave + last / rates.last_per_us, wave + moving / rates.bytes_per_us) + rates.round_us;
  return config;
}

OverlapConfig reduce(const ProductShape& shape, HardwareModel model) {
  model.sms = std::max(model.sms, 4);
  const bool sums_all = shape.op == OpKind::matmul_all_reduce;
  const double most = sums_all ? model.exchange.most_reduced : model.exchange.most_reduce_scattered;
  const bool exchange = shape.ranks == 2 && pushed_bytes(shape) <= most;
  const auto config = [&](int block_n) {
    const int tiles = ceil_div(shape.m, kTileRows) * ceil_div(shape.n, block_n);
    return reduce_with(shape, model, block_n, exchange ? 0 : communicating_blocks(shape, model, tiles));
  };
  const OverlapConfig narrow = config(128), wide = config(256);
  return narrow.microseconds < wide.microseconds ? narrow : wide;
}

}  // namespace jax_ep::plans
