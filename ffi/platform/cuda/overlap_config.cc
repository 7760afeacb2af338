#include "platform/cuda/overlap_config.h"

#include <algorithm>
#include <cmath>

namespace jax_ep {
namespace {

constexpr int kTileRows = 128;
constexpr int kMostPairsPerBand = 8;
// Fitted to the times of all three ops on 2 and 4 H200, over tiles and communicating blocks.
constexpr double kFlopsPerMicrosecond = 6.1e6;  // of a processor with tiles of 256 columns
constexpr double kNarrowPart = 0.95;            // of that with 128 columns
constexpr double kTileMicroseconds = 8;         // to begin and to store a tile
constexpr double kRoundMicroseconds = 9;        // from the last tile to the last flag
constexpr double kExposedWaves = 1.4;           // of what moves, what nothing is left to hide

// Bytes a microsecond that come in, or go out.
struct Speed {
  double per_block, most;
};
constexpr Speed kPushing = {14e3, 174e3};  // rows in turns to all ranks, this one among them, beside a product

constexpr double kSparedBytesPerMicrosecond = 1e6;  // of local memory, to read b once more for each band

int ceil_div(int a, int b) { return (a + b - 1) / b; }

// To push a rank's rows.
double moving_microseconds(double m, double k, int value_bytes, int ranks, int communicating) {
  const double bytes = m * k * value_bytes * (ranks - 1) / ranks;
  return bytes / std::min(kPushing.most, communicating * kPushing.per_block);
}

}  // namespace

OverlapConfig overlap_with(OpKind, int m, int n, int k, int value_bytes, int ranks, int processors, int block_n,
                           int communicating) {
  const int rows = ceil_div(m, kTileRows), columns = ceil_div(n, block_n);
  OverlapConfig config{};
  config.block_n = block_n;
  config.communicating = communicating;
  config.apart = true;
  config.multiplying = std::min(processors - communicating, rows * columns + 1) / 2 * 2;
  const int waves = ceil_div(rows * columns, config.multiplying);
  const double rate = kFlopsPerMicrosecond * (block_n == 128 ? kNarrowPart : 1);
  const double wave = 2.0 * kTileRows * block_n * k / rate + kTileMicroseconds;
  // Whole rows of tiles are announced: a wave should finish some, if that does not wear out local memory.
  const double rereads = waves * wave * kSparedBytesPerMicrosecond / (2.0 * n * k);
  const int least = static_cast<int>(std::min<double>(kMostPairsPerBand, std::ceil(rows / 2 / rereads)));
  config.band = std::clamp(config.multiplying / columns / 2, std::max(1, least), kMostPairsPerBand);
  const double moving = moving_microseconds(m, k, value_bytes, ranks, communicating);
  // What one wave makes can move only after it, or before it; the rest moves while others compute.
  config.microseconds = std::max(waves * wave + kExposedWaves * moving / waves, moving + wave) + kRoundMicroseconds;
  return config;
}

OverlapConfig choose_overlap(OpKind op, int m, int n, int k, int value_bytes, int ranks, int processors) {
  processors = std::max(processors, 4);
  OverlapConfig best{};
  for (const int block_n : {256, 128})
    for (const int communicating : {2, 4, 6, 8, 10, 12, 14, 16, 20, 24, 32}) {
      if (communicating + 2 > processors) break;
      const OverlapConfig config = overlap_with(op, m, n, k, value_bytes, ranks, processors, block_n, communicating);
      if (best.block_n == 0 || config.microseconds < best.microseconds) best = config;
    }
  return best;
}

int OverlapConfig::blocks() const { return apart ? communicating + multiplying : std::max(communicating, multiplying); }

PairOrder from_rank(int pairs, int rank, int ranks) { return {pairs * rank / ranks, 1}; }

std::string OverlapConfig::describe() const {
  return "tiles 128x" + std::to_string(block_n) + ", band " + std::to_string(band) + ", " +
         std::to_string(communicating) + " + " + std::to_string(multiplying) + " blocks, expected " +
         std::to_string(static_cast<int>(microseconds)) + " us";
}

}  // namespace jax_ep
