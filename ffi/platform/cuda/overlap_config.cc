#include "platform/cuda/overlap_config.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace jax_ep {
namespace {

constexpr int kTileRows = 128;
constexpr int kMostPairsPerBand = 8;
// Measured on H200.
constexpr double kFlopsPerMicrosecond = 5.4e6;  // of a processor with tiles of 256 columns
constexpr double kNarrowPart = 0.94;            // of that with 128 columns
constexpr double kBytesPerMicrosecond = 25e3;   // one way, that a communicating block moves
constexpr double kMostBytesPerMicrosecond = 340e3;
constexpr double kTileMicroseconds = 1.5;  // to begin and to store a tile
constexpr double kRoundMicroseconds = 8;   // from the last tile to the last flag

constexpr double kSparedBytesPerMicrosecond = 1e6;  // of local memory, to read b once more for each band

int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Bytes that a rank sends.
double bytes_of(OpKind op, double m, double n, double k, int value_bytes, int ranks) {
  const double others = (ranks - 1.0) / ranks;
  if (op == OpKind::all_gather_matmul) return others * m * k * value_bytes;
  return others * m * n * value_bytes * (op == OpKind::matmul_all_reduce ? 2 : 1);
}

}  // namespace

OverlapConfig overlap_with(OpKind op, int m, int n, int k, int value_bytes, int ranks, int processors, int block_n,
                           int communicating) {
  const int rows = ceil_div(m, kTileRows), columns = ceil_div(n, block_n);
  OverlapConfig config{};
  config.block_n = block_n;
  config.communicating = communicating;
  config.multiplying = std::min(processors - communicating, rows * columns + 1) / 2 * 2;
  const int waves = ceil_div(rows * columns, config.multiplying);
  const double rate = kFlopsPerMicrosecond * (block_n == 128 ? kNarrowPart : 1);
  const double wave = 2.0 * kTileRows * block_n * k / rate + kTileMicroseconds;
  const double speed = std::min(kMostBytesPerMicrosecond, communicating * kBytesPerMicrosecond);
  // Whole rows of tiles are announced: a wave should finish some, if that does not wear out local memory.
  const double rereads = waves * wave * kSparedBytesPerMicrosecond / (2.0 * n * k);
  const int least = static_cast<int>(std::min<double>(kMostPairsPerBand, std::ceil(rows / 2 / rereads)));
  config.band = std::clamp(config.multiplying / columns / 2, std::max(1, least), kMostPairsPerBand);
  const double moving = bytes_of(op, m, n, k, value_bytes, ranks) / speed;
  // What one wave makes can move only after it, or before it; the rest moves while others compute.
  config.microseconds = std::max(waves * wave + moving / waves, moving + wave) + kRoundMicroseconds;
  return config;
}

OverlapConfig choose_overlap(OpKind op, int m, int n, int k, int value_bytes, int ranks, int processors) {
  OverlapConfig best{};
  for (const int block_n : {256, 128})
    for (const int communicating : {4, 6, 8, 10, 12, 14, 16, 20, 24, 32}) {
      const OverlapConfig config = overlap_with(op, m, n, k, value_bytes, ranks, processors, block_n, communicating);
      if (best.block_n == 0 || config.microseconds < best.microseconds) best = config;
    }
  return best;
}

PairOrder in_turns(int pairs, int ranks) {
  PairOrder order{0, std::max(1, pairs / ranks)};
  while (std::gcd(order.step, std::max(1, pairs)) != 1) ++order.step;  // else it would come back too early
  return order;
}

PairOrder from_rank(int pairs, int rank, int ranks) { return {pairs * rank / ranks, 1}; }

std::string OverlapConfig::describe() const {
  return "tiles 128x" + std::to_string(block_n) + ", band " + std::to_string(band) + ", " +
         std::to_string(communicating) + " + " + std::to_string(multiplying) + " blocks, expected " +
         std::to_string(static_cast<int>(microseconds)) + " us";
}

}  // namespace jax_ep
