#include <algorithm>

#include "gemm/config.h"
#include "kernels/matmul/overlap_config.h"

namespace jax_ep {
namespace {

constexpr int kTileRows = 128;
constexpr int kMostPairsPerBand = 16;
constexpr int kLeastBands = 8;  // so that what the last one moves is little
// Fitted to times on 2 and 4 H200.
constexpr double kFlopsPerMicrosecond = 6.2e6;  // of a processor with tiles of 256 columns
constexpr double kNarrowPart = 0.94;            // of that with 128 columns
constexpr double kTileMicroseconds = 2.5;       // to begin and to store a tile
constexpr double kRoundMicroseconds = 15;       // from the last tile to the last flag, and to begin
constexpr double kBytesPerMicrosecond = 300e3;  // that come in, or go out
constexpr double kLastPerMicrosecond = 230e3;   // the same when all wait for them
constexpr int kMostPushing = 144;               // blocks times peers

// Of an exchange, fitted to times on 2 H200.
constexpr int kSpareProcessors = 2;              // where other kernels get on while all blocks wait for a peer
constexpr double kMostReduced = 28e6;            // bytes: to push more holds up the product longer than fetching takes
constexpr double kMostScattered = 17e6;          // the same for matmul_reduce_scatter
constexpr double kExchangeMicroseconds = 5;      // to begin, and from the last tile to the last sum
constexpr double kTurnMicroseconds = 1.5;        // to begin a tile of 128 columns: others are stored meanwhile
constexpr double kPushedPerMicrosecond = 380e3;  // bytes
constexpr double kExposed = 0.75, kNarrowExposed = 0.5;  // of the time to push tiles of 256 and of 128 columns

int ceil_div(int a, int b) { return (a + b - 1) / b; }

double pushed_bytes(OpKind op, int m, int n, int value_bytes) {
  return 1.0 * m * n * value_bytes * (op == OpKind::matmul_all_reduce ? 1 : 0.5);
}

// Of two ranks. All blocks multiply, and push what they have.
OverlapConfig exchange_with(OpKind op, int m, int n, int k, int value_bytes, int processors, int block_n) {
  const int rows = ceil_div(m, kTileRows), columns = ceil_div(n, block_n), most = processors - kSpareProcessors;
  OverlapConfig config{};
  config.block_n = block_n;
  config.split_k = gemm::should_split(block_n, k, rows * columns, most);
  const int shares = rows * columns * (config.split_k ? 2 : 1);
  config.multiplying = std::min(most, shares + 1) / 2 * 2;
  config.band = block_n == 128 ? std::clamp(config.multiplying / columns / 2, 1, kMostPairsPerBand) : ceil_div(rows, 2);
  const double rate = kFlopsPerMicrosecond * (block_n == 128 ? kNarrowPart : 1) * (config.split_k ? 2 : 1);
  const double wave = 2.0 * kTileRows * block_n * k / rate + (block_n == 128 ? kTurnMicroseconds : kTileMicroseconds);
  config.microseconds =
      ceil_div(shares, config.multiplying) * wave + kExchangeMicroseconds +
      pushed_bytes(op, m, n, value_bytes) / kPushedPerMicrosecond * (block_n == 128 ? kNarrowExposed : kExposed);
  return config;
}

// Those that fetch and sum; the others are free after the product. Sums that are pushed while tiles are computed come
// from fewer.
int communicating_blocks(OpKind op, int tiles, int ranks, int processors) {
  const int most = std::max(processors * 3 / 4 / 2 * 2, 2);
  return op == OpKind::matmul_all_reduce && tiles > processors ? pushing_blocks(kMostPushing, ranks, most) : most;
}

}  // namespace

OverlapConfig reduce_with(OpKind op, int m, int n, int k, int value_bytes, int ranks, int processors, int block_n,
                          int communicating) {
  if (communicating == 0) return exchange_with(op, m, n, k, value_bytes, processors, block_n);
  const int rows = ceil_div(m, kTileRows), columns = ceil_div(n, block_n), tiles = rows * columns;
  OverlapConfig config{};
  config.block_n = block_n;
  config.communicating = communicating;
  // Few tiles: two processors take one, half of the contraction each.
  config.split_k = gemm::should_split(block_n, k, tiles, processors);
  const int parts = config.split_k ? 2 : 1;
  config.multiplying = std::min(processors, parts * tiles + 1) / 2 * 2;
  // Whole rows of tiles are announced: a wave should finish some, or, where there are many, many waves.
  config.band = std::clamp(std::max(config.multiplying / columns / 2, rows / 2 / kLeastBands), 1, kMostPairsPerBand);
  const int waves = ceil_div(parts * tiles, config.multiplying);
  const double rate = kFlopsPerMicrosecond * (block_n == 128 ? kNarrowPart : 1);
  const double wave = 2.0 * kTileRows * block_n * k / rate / parts + kTileMicroseconds;
  // Each rank fetches what it sums, and sends the sums. What the last wave makes can move only after it.
  const int times = op == OpKind::matmul_all_reduce ? 2 : 1;
  const double moving = 1.0 * m * n * value_bytes * times * (ranks - 1) / ranks;
  const double last = moving * (1 - 1.0 * (waves - 1) * config.multiplying / (parts * tiles));
  config.microseconds =
      std::max(waves * wave + last / kLastPerMicrosecond, wave + moving / kBytesPerMicrosecond) + kRoundMicroseconds;
  return config;
}

OverlapConfig choose_reduce(OpKind op, int m, int n, int k, int value_bytes, int ranks, int processors) {
  processors = std::max(processors, 4);
  const double most = op == OpKind::matmul_all_reduce ? kMostReduced : kMostScattered;
  const bool exchange = ranks == 2 && pushed_bytes(op, m, n, value_bytes) <= most;
  const auto config = [&](int block_n) {
    const int tiles = ceil_div(m, kTileRows) * ceil_div(n, block_n);
    const int communicating = exchange ? 0 : communicating_blocks(op, tiles, ranks, processors);
    return reduce_with(op, m, n, k, value_bytes, ranks, processors, block_n, communicating);
  };
  const OverlapConfig narrow = config(128), wide = config(256);
  return narrow.microseconds < wide.microseconds ? narrow : wide;
}

}  // namespace jax_ep
