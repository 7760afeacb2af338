// How an all_gather_matmul is laid over the processors: its rounds of tiles are played through, with the rows that each
// must wait for.
#include <algorithm>

#include "kernels/matmul/overlap_config.h"

namespace jax_ep {
namespace {

constexpr int kTileRows = 128, kPairRows = 2 * kTileRows;
constexpr int kMostPairsPerBand = 8;
// Fitted to times on 2 and 4 H200, over tiles, bands and communicating blocks.
constexpr double kFlopsPerMicrosecond = 5.9e6;  // of a processor with tiles of 256 columns
constexpr double kNarrowPart = 0.93;            // of that with 128 columns
constexpr double kTileMicroseconds = 1;         // to begin and to store a tile
constexpr double kGreetMicroseconds = 10;       // until the first rows can be here
constexpr double kBytesPerBlock = 2.3e3;        // that leave for each peer in a microsecond
constexpr int kMostLeaving = 108;               // blocks times peers
constexpr double kOnceMicroseconds = 7;         // to start and to end the kernel

int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Times in microseconds.
struct Plan {
  int pairs, own;            // of rows of tiles; of them of this rank's rows alone
  int band_tiles, clusters;  // in pairs of tiles
  int band;
  double tile, moving;  // for a tile; until all rows are here, which come at an even rate

  // When the rows of the first so many pairs are here.
  double here(int wanted) const {
    return wanted > own ? kGreetMicroseconds + moving * (wanted - own) / (pairs - own) : 0;
  }

  // Until the last of so many is done.
  double microseconds(int tiles) const {
    double time = 0;
    for (int done = 0; done < tiles; done += clusters) {
      const int last = std::min(done + clusters, tiles) - 1;
      time = std::max(time, here(std::min((last / band_tiles + 1) * band, pairs))) + tile;
    }
    return time + kOnceMicroseconds;
  }
};

}  // namespace

PairOrder own_rows_first(int m, int rank, int ranks) {
  const int pairs = ceil_div(m * ranks, kTileRows) / 2, begin = std::min(ceil_div(m * rank, kPairRows), pairs);
  const int lead = std::max(0, std::min(m * (rank + 1) / kPairRows, pairs) - begin);
  return {begin, lead, std::max(1, ranks - 1)};
}

OverlapConfig gather_with(int m, int n, int k, int value_bytes, int ranks, int processors, int block_n,
                          int communicating) {
  const int rows = ceil_div(m, kTileRows), columns = ceil_div(n, block_n), own = m / ranks / kPairRows;
  OverlapConfig config{};
  config.block_n = block_n;
  config.communicating = communicating;
  config.multiplying = std::min(processors, rows * columns + 1) / 2 * 2;
  const double rate = kFlopsPerMicrosecond * (block_n == 128 ? kNarrowPart : 1);
  const double tile = 2.0 * kTileRows * block_n * k / rate + kTileMicroseconds;
  const double moving = double(m) / ranks * k * value_bytes / (communicating * kBytesPerBlock);
  // Tiles of a band wait for all of its rows: unless all are here before this rank's are done, small bands are better.
  const bool waits = moving + kGreetMicroseconds > tile * own * columns / (config.multiplying / 2);
  // Without tiles of this rank's rows alone there is nothing to begin with.
  config.band = own ? std::clamp(waits ? own / 4 : own, std::min(own, 2), kMostPairsPerBand) : kMostPairsPerBand;
  const Plan plan{ceil_div(rows, 2), own, config.band * columns, config.multiplying / 2, config.band, tile, moving};
  config.microseconds = plan.microseconds(rows / 2 * columns + rows % 2 * ceil_div(columns, 2));
  return config;
}

OverlapConfig choose_gather(int m, int n, int k, int value_bytes, int ranks, int processors) {
  const int even = std::max(processors / 2 * 2, 2);
  const int communicating = pushing_blocks(kMostLeaving, ranks, even);
  const OverlapConfig wide = gather_with(m, n, k, value_bytes, ranks, even, 256, communicating);
  const OverlapConfig narrow = gather_with(m, n, k, value_bytes, ranks, even, 128, communicating);
  return narrow.microseconds < wide.microseconds ? narrow : wide;
}

}  // namespace jax_ep
