// How an all_gather_matmul is laid over the SMs: its rounds of tiles are played through, with the rows that each must
// wait for.
#include <algorithm>

#include "comm/integers.h"
#include "kernels/matmul/plan.h"

namespace jax_ep {
namespace {

constexpr int kPairRows = 2 * plans::kTileRows;

// Times in microseconds.
struct Rounds {
  const GatherRates& rates;
  int pairs, own;            // of rows of tiles; of them of this rank's rows alone
  int band_tiles, clusters;  // in pairs of tiles
  int band;
  double tile, moving;  // for a tile; until all rows are here, which come at an even rate

  // When the rows of the first so many pairs are here.
  double here(int wanted) const { return wanted > own ? rates.greet_us + moving * (wanted - own) / (pairs - own) : 0; }

  // Until the last of so many is done.
  double microseconds(int tiles) const {
    double time = 0;
    for (int done = 0; done < tiles; done += clusters) {
      const int last = std::min(done + clusters, tiles) - 1;
      time = std::max(time, here(std::min((last / band_tiles + 1) * band, pairs))) + tile;
    }
    return time + rates.once_us;
  }
};

}  // namespace

PairOrder own_rows_first(int m, int rank, int ranks) {
  const int pairs = ceil_div(m * ranks, plans::kTileRows) / 2, begin = std::min(ceil_div(m * rank, kPairRows), pairs);
  const int lead = std::max(0, std::min(m * (rank + 1) / kPairRows, pairs) - begin);
  return {begin, lead, std::max(1, ranks - 1)};
}

namespace plans {

OverlapConfig gather_with(const ProductShape& shape, const HardwareModel& model, int block_n, int communicating) {
  const GatherRates& rates = model.gather;
  const auto& [op, m, n, k, value_bytes, ranks] = shape;
  const int rows = ceil_div(m, kTileRows), columns = ceil_div(n, block_n), own = m / ranks / kPairRows;
  OverlapConfig config{};
  config.block_n = block_n;
  config.communicating = communicating;
  config.multiplying = std::min(model.sms, rows * columns + 1) / 2 * 2;
  const double rate = rates.flops_per_us * (block_n == 128 ? rates.narrow : 1);
  const double tile = 2.0 * kTileRows * block_n * k / rate + rates.tile_us;
  const double moving = double(m) / ranks * k * value_bytes / (communicating * rates.bytes_per_cta);
  // Tiles of a band wait for all of its rows: unless all are here before this rank's are done, small bands are better.
  const bool waits = moving + rates.greet_us > tile * own * columns / (config.multiplying / 2);
  // Without tiles of this rank's rows alone there is nothing to begin with.
  config.band = own ? std::clamp(waits ? own / 4 : own, std::min(own, 2), rates.most_pairs) : rates.most_pairs;
  const int clusters = config.multiplying / 2;
  const Rounds rounds{rates, ceil_div(rows, 2), own, config.band * columns, clusters, config.band, tile, moving};
  config.microseconds = rounds.microseconds(rows / 2 * columns + rows % 2 * ceil_div(columns, 2));
  return config;
}

OverlapConfig gather(const ProductShape& shape, HardwareModel model) {
  model.sms = std::max(model.sms / 2 * 2, 2);
  const int communicating = pushing_blocks(model.gather.most_leaving, shape.ranks, model.sms);
  const OverlapConfig wide = gather_with(shape, model, 256, communicating);
  const OverlapConfig narrow = gather_with(shape, model, 128, communicating);
  return narrow.microseconds < wide.microseconds ? narrow : wide;
}

}  // namespace plans
}  // namespace jax_ep
