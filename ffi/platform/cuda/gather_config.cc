// How an all_gather_matmul is laid over the processors: its rounds of tiles are played through, with the rows that each
// must wait for.
#include <algorithm>

#include "platform/cuda/overlap_config.h"

namespace jax_ep {
namespace {

constexpr int kTileRows = 128, kPairRows = 2 * kTileRows;
constexpr int kMostPairsPerBand = 8;
// Fitted to times on 4 H200, over tiles and communicating blocks.
constexpr double kFlopsPerMicrosecond = 6.1e6;               // of a processor with tiles of 256 columns
constexpr double kNarrowPart = 0.95;                         // of that with 128 columns
constexpr double kTileMicroseconds = 3;                      // to begin and to store a tile
constexpr double kGreetMicroseconds = 10;                    // until the first rows can be here
constexpr double kBytesPerBlock = 33e3, kMostBytes = 310e3;  // that leave in a microsecond

constexpr double kUnevenPart = 0.05;  // of what moves, as neither links nor ranks are even

int ceil_div(int a, int b) { return (a + b - 1) / b; }

// What the rounds of tiles depend on. Times in microseconds.
struct Plan {
  int tiles, own;  // of them of this rank's rows alone
  int multiplying, communicating;
  double round, moved;  // for a tile; until all rows are here

  // When a round can begin that ends with so many tiles done, as rows come at an even rate.
  double start(double free, int done) const {
    return own < tiles ? std::max(free, moved * std::clamp(double(done - own) / (tiles - own), 0.0, 1.0)) : free;
  }

  // Rounds that begin before those that communicate are free.
  int rounds_before_all() const {
    int rounds = 0, done = multiplying;
    for (double time = 0; done < tiles + multiplying; ++rounds, done += multiplying) {
      time = start(time, done);
      if (time >= moved) break;
      time += round;
    }
    return rounds;
  }

  // Until the last tile is done, if those that communicate are to multiply after `early` rounds, or when they are free.
  double microseconds(int early) const {
    double time = 0, late = moved;
    for (int done = 0, rounds = 0; done < tiles; ++rounds) {
      done += multiplying;
      time = start(time, done);
      if (rounds >= early) {
        done += communicating;
        late = std::max(late, time) + round;
      }
      time += round;
    }
    return std::max(time, late) + kUnevenPart * moved;
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
  const int rows = ceil_div(m, kTileRows), columns = ceil_div(n, block_n);
  OverlapConfig config{};
  config.block_n = block_n;
  config.communicating = communicating;
  config.apart = true;
  config.multiplying = std::min(processors - communicating, rows * columns + 1) / 2 * 2;
  // First this rank's rows, then as many others at a time.
  config.band = std::clamp(m / ranks / kPairRows, 2, kMostPairsPerBand);
  const double rate = kFlopsPerMicrosecond * (block_n == 128 ? kNarrowPart : 1);
  const double bytes = double(m) * k * value_bytes * (ranks - 1) / ranks;
  const Plan plan{rows * columns,
                  m / ranks / kPairRows * 2 * columns,
                  config.multiplying,
                  communicating,
                  2.0 * kTileRows * block_n * k / rate + kTileMicroseconds,
                  kGreetMicroseconds + bytes / std::min(kMostBytes, communicating * kBytesPerBlock)};
  config.early_rounds = plan.rounds_before_all();
  config.microseconds = plan.microseconds(config.early_rounds);
  if (config.early_rounds == 0) return config;
  const double sooner = plan.microseconds(config.early_rounds - 1);  // if they are a little late
  if (sooner < config.microseconds) {
    config.microseconds = sooner;
    --config.early_rounds;
  }
  return config;
}

OverlapConfig choose_gather(int m, int n, int k, int value_bytes, int ranks, int processors) {
  processors = std::max(processors, 4);
  OverlapConfig best{};
  for (const int block_n : {256, 128})
    for (const int communicating : {2, 4, 8, 12, 16, 24, 32}) {
      if (communicating + 2 > processors) break;
      const OverlapConfig config = gather_with(m, n, k, value_bytes, ranks, processors, block_n, communicating);
      if (best.block_n == 0 || config.microseconds < best.microseconds) best = config;
    }
  return best;
}

}  // namespace jax_ep
