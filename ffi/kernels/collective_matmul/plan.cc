#include "kernels/collective_matmul/plan.h"

#include <algorithm>

#include "comm/integers.h"
#include "gemm/plan.h"
#include "gemm/problem.h"

namespace jax_ep {
namespace {

constexpr int kTileRows = gemm::kBlockM;
constexpr int kPairRows = 2 * kTileRows;

// Simulates the rounds of tiles of a gather, which wait for rows. Times are in microseconds.
struct Rounds {
  const GatherRates& rates;
  int pairs, own;            // pairs of rows of tiles; how many have rows of this rank only
  int band_tiles, clusters;  // in pairs of tiles
  int band;
  double tile, moving;  // for a tile; for all rows, which arrive at an even rate

  double arrival(int wanted) const {
    return wanted > own ? rates.handshake_us + moving * (wanted - own) / (pairs - own) : 0;
  }

  double microseconds(int tiles) const {
    double time = 0;
    for (int done = 0; done < tiles; done += clusters) {
      const int last = std::min(done + clusters, tiles) - 1;
      time = std::max(time, arrival(std::min((last / band_tiles + 1) * band, pairs))) + tile;
    }
    return time + rates.once_us;
  }
};

// The number of CTAs that push: even, at most `most`, and fewer if there are more peers. More CTAs would only delay the
// product's loads.
int pushing_ctas(int ctas_times_peers, int ranks, int most) {
  return std::max(std::min(ctas_times_peers / std::max(ranks - 1, 1), most) / 2 * 2, 2);
}

OverlapConfig gather_with(const CollectiveMatmulShape& shape, const HardwareModel& model, int block_n,
                          int communicating) {
  const GatherRates& rates = model.rates.gather;
  const auto& [op, m, n, k, value_bytes, ranks] = shape;
  const int rows = ceil_div(m, kTileRows), columns = ceil_div(n, block_n), own = m / ranks / kPairRows;
  OverlapConfig config{};
  config.block_n = block_n;
  config.communicating = communicating;
  config.multiplying = std::min(model.sms, rows * columns + 1) / 2 * 2;
  const double rate = rates.flops_per_us * (block_n == 128 ? rates.narrow : 1);
  const double tile = 2.0 * kTileRows * block_n * k / rate + rates.tile_us;
  const double moving = double(m) / ranks * k * value_bytes / (communicating * rates.bytes_per_cta);
  // Tiles of a band wait for all its rows. Small bands are better, unless all rows arrive before this rank's own tiles
  // are done.
  const bool waits = moving + rates.handshake_us > tile * own * columns / (config.multiplying / 2);
  // If no tile has rows of this rank only, all tiles wait.
  config.band = own ? std::clamp(waits ? own / 4 : own, std::min(own, 2), rates.most_pairs) : rates.most_pairs;
  const int clusters = config.multiplying / 2;
  const Rounds rounds{rates, ceil_div(rows, 2), own, config.band * columns, clusters, config.band, tile, moving};
  config.microseconds = rounds.microseconds(rows / 2 * columns + rows % 2 * ceil_div(columns, 2));
  return config;
}

OverlapConfig gather(const CollectiveMatmulShape& shape, HardwareModel model) {
  model.sms = std::max(model.sms / 2 * 2, 2);
  const int communicating = pushing_ctas(model.rates.gather.most_leaving, shape.ranks, model.sms);
  const OverlapConfig wide = gather_with(shape, model, 256, communicating);
  const OverlapConfig narrow = gather_with(shape, model, 128, communicating);
  return narrow.microseconds < wide.microseconds ? narrow : wide;
}

double pushed_bytes(const CollectiveMatmulShape& shape) {
  return 1.0 * shape.m * shape.n * shape.value_bytes * (shape.op == OpKind::matmul_all_reduce ? 1 : 0.5);
}

// The plan for two ranks that exchange: all CTAs multiply and push.
OverlapConfig exchange_with(const CollectiveMatmulShape& shape, const HardwareModel& model, int block_n) {
  const ExchangeRates& rates = model.rates.exchange;
  const bool is_narrow = block_n == 128;
  const int rows = ceil_div(shape.m, kTileRows), columns = ceil_div(shape.n, block_n);
  const int most = model.sms - rates.spare_sms;
  OverlapConfig config{};
  config.block_n = block_n;
  config.split_k = gemm::should_split(block_n, shape.k, rows * columns, most);
  const int parts = rows * columns * (config.split_k ? 2 : 1);
  config.multiplying = std::min(most, parts + 1) / 2 * 2;
  config.band =
      is_narrow ? std::clamp(config.multiplying / columns / 2, 1, model.rates.reduce.most_pairs) : ceil_div(rows, 2);
  const double rate =
      model.rates.reduce.flops_per_us * (is_narrow ? model.rates.reduce.narrow : 1) * (config.split_k ? 2 : 1);
  const double wave =
      2.0 * kTileRows * block_n * shape.k / rate + (is_narrow ? rates.ping_pong_us : model.rates.reduce.tile_us);
  config.microseconds = ceil_div(parts, config.multiplying) * wave + rates.once_us +
                        pushed_bytes(shape) / rates.pushed_per_us * (is_narrow ? rates.narrow_exposed : rates.exposed);
  return config;
}

// The number of CTAs that fetch and sum. If sums are pushed while tiles are still computed, fewer CTAs push.
int communicating_ctas(const CollectiveMatmulShape& shape, const HardwareModel& model, int tiles) {
  const int most = std::max(model.sms * 3 / 4 / 2 * 2, 2);
  const bool pushes = shape.op == OpKind::matmul_all_reduce && tiles > model.sms;
  return pushes ? pushing_ctas(model.rates.reduce.most_pushing, shape.ranks, most) : most;
}

OverlapConfig reduce_with(const CollectiveMatmulShape& shape, const HardwareModel& model, int block_n,
                          int communicating) {
  if (communicating == 0) return exchange_with(shape, model, block_n);
  const ReduceRates& rates = model.rates.reduce;
  const int rows = ceil_div(shape.m, kTileRows), columns = ceil_div(shape.n, block_n), tiles = rows * columns;
  OverlapConfig config{};
  config.block_n = block_n;
  config.communicating = communicating;
  config.split_k = gemm::should_split(block_n, shape.k, tiles, model.sms);
  const int parts = config.split_k ? 2 : 1;
  config.multiplying = std::min(model.sms, parts * tiles + 1) / 2 * 2;
  // Whole rows of tiles are announced. A wave should finish some of them, and many rows should take many waves.
  config.band =
      std::clamp(std::max(config.multiplying / columns / 2, rows / 2 / rates.least_bands), 1, rates.most_pairs);
  const int waves = ceil_div(parts * tiles, config.multiplying);
  const double rate = rates.flops_per_us * (block_n == 128 ? rates.narrow : 1);
  const double wave = 2.0 * kTileRows * block_n * shape.k / rate / parts + rates.tile_us;
  // Each rank fetches the rows that it sums, and sends the sums. Rows of the last wave move after it.
  const int times = shape.op == OpKind::matmul_all_reduce ? 2 : 1;
  const double moving = 1.0 * shape.m * shape.n * shape.value_bytes * times * (shape.ranks - 1) / shape.ranks;
  const double last = moving * (1 - 1.0 * (waves - 1) * config.multiplying / (parts * tiles));
  config.microseconds =
      std::max(waves * wave + last / rates.last_per_us, wave + moving / rates.bytes_per_us) + rates.round_us;
  return config;
}

OverlapConfig reduce(const CollectiveMatmulShape& shape, HardwareModel model) {
  model.sms = std::max(model.sms, 4);
  const bool sums_all = shape.op == OpKind::matmul_all_reduce;
  const double most = sums_all ? model.rates.exchange.most_reduced : model.rates.exchange.most_reduce_scattered;
  const bool exchange = shape.ranks == 2 && pushed_bytes(shape) <= most;
  const auto config = [&](int block_n) {
    const int tiles = ceil_div(shape.m, kTileRows) * ceil_div(shape.n, block_n);
    return reduce_with(shape, model, block_n, exchange ? 0 : communicating_ctas(shape, model, tiles));
  };
  const OverlapConfig narrow = config(128), wide = config(256);
  return narrow.microseconds < wide.microseconds ? narrow : wide;
}

}  // namespace

CollectiveMatmulShape shape_of(const AllGatherMatmulArgs& args, int ranks) {
  return {kind_of(args), args.m * ranks, args.n, args.k, size_of(args.operand_dtype), ranks};
}

CollectiveMatmulShape shape_of(const MatmulReduceArgs& args, int ranks) {
  return {kind_of(args), args.m, args.n, args.k, size_of(args.dtype), ranks};
}

OverlapConfig plan_overlap(const CollectiveMatmulShape& shape, const HardwareModel& model) {
  return shape.op == OpKind::all_gather_matmul ? gather(shape, model) : reduce(shape, model);
}

OverlapConfig plan_overlap_with(const CollectiveMatmulShape& shape, const HardwareModel& model, int block_n,
                                int communicating) {
  return shape.op == OpKind::all_gather_matmul ? gather_with(shape, model, block_n, communicating)
                                               : reduce_with(shape, model, block_n, communicating);
}

int OverlapConfig::ctas() const { return std::max(communicating, multiplying); }

std::string OverlapConfig::describe() const {
  return concat("tiles 128x", block_n, ", band ", band, ", ", communicating, " + ", multiplying,
                split_k ? " CTAs, two a tile, expected " : " CTAs, expected ", static_cast<int>(microseconds), " us");
}

PairOrder own_rows_first(int m, int rank, int ranks) {
  const int pairs = ceil_div(m * ranks, kTileRows) / 2, begin = std::min(ceil_div(m * rank, kPairRows), pairs);
  const int lead = std::max(0, std::min(m * (rank + 1) / kPairRows, pairs) - begin);
  return {begin, lead, std::max(1, ranks - 1)};
}

}  // namespace jax_ep
