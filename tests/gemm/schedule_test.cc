// The schedule of the GEMM core on the host: for random shapes, groups and orders of rows, every element of the result
// that should be computed is in exactly one tile, with the right range of the contraction.
#include "gemm/schedule.h"

#include <random>
#include <vector>

#include "../protocol/expect.h"
#include "gemm/plan.h"
#include "gemm/row_schedule.h"
#include "kernels/collective_matmul/plan.h"

using namespace jax_ep::gemm;
using jax_ep::expect;
using jax_ep::Part;

namespace {

struct Range {
  int begin, end;
};

// Where groups lie among `total`, with what is left as one more range.
std::vector<Range> ranges_of(const std::vector<int>& sizes, int total) {
  std::vector<Range> ranges;
  int start = 0;
  for (const int size : sizes) {
    const int end = std::min(total, start + std::max(0, size));
    ranges.push_back({start, end});
    start = end;
  }
  ranges.push_back({start, total});
  return ranges;
}

// CTAs of a cluster must agree on group and contraction in every step, or they would wait for each other forever.
void check_clusters(const Problem& problem, const Config& config, Part cta) {
  for (int first = 0; first < config.ctas; first += kCluster) {
    cta.index = first;
    Schedule one(problem, config.block_n, cta);
    cta.index = first + 1;
    Schedule other(problem, config.block_n, cta);
    for (bool more = true; more;) {
      Tile a{}, b{};
      more = one.next(&a);
      expect(other.next(&b) == more, "CTAs of a cluster have as many tiles");
      if (!more) break;
      expect(a.group == b.group && a.common == b.common, "clusters agree");
      expect(a.k_end - a.k_begin == b.k_end - b.k_begin, "they contract as much");
      expect((b.k_begin == a.k_begin) == (a.common != Common::tile || a.k_begin == a.k_end), "they agree on ranges");
      const int down = a.common == Common::rhs ? kBlockM : 0, right = a.common == Common::lhs ? config.block_n : 0;
      expect(b.row == a.row + down && b.col == a.col + right, "they share an operand");
      expect(a.row < a.row_end && b.row < b.row_end, "no row of tiles is wasted");
    }
  }
}

void check_cover(const Problem& problem, const Config& config, const std::vector<int>& sizes, Part cta) {
  const bool rows = problem.grouping == Grouping::m_grouped, contraction = problem.grouping == Grouping::k_grouped;
  const auto ranges = ranges_of(sizes, contraction ? problem.k : problem.m);
  std::vector<int> seen(size_t(problem.m) * problem.n * (contraction ? problem.groups : 1));
  for (int index = 0; index < config.ctas; ++index) {
    cta.index = index;
    Schedule schedule(problem, config.block_n, cta);
    for (Tile tile; schedule.next(&tile);) {
      const Range range = ranges[problem.grouping == Grouping::none ? 0 : tile.group];
      const Range wanted = contraction ? range : Range{0, rows && tile.group == problem.groups ? 0 : problem.k};
      const int steps = (wanted.end - wanted.begin + kBlockK - 1) / kBlockK;
      const int half = problem.split_k ? (steps + 1) / 2 * kBlockK : 0, begin = wanted.begin + index % kCluster * half;
      expect(tile.k_begin == begin && tile.k_end == (problem.split_k ? begin + half : wanted.end),
             "a tile has its contraction");
      if (rows) expect(tile.row >= range.begin && tile.row_end == range.end, "a tile has rows of its group");
      const size_t matrix = contraction ? tile.group : 0;
      for (int row = tile.row; row < std::min(tile.row + kBlockM, tile.row_end); ++row)
        for (int col = tile.out_col; col < std::min(tile.out_end, problem.n); ++col)
          ++seen[(matrix * problem.m + row) * problem.n + col];
    }
  }
  for (const int times : seen) expect(times == 1, "every element is in one tile");
}

// Tiles whose height follows the rows: by both CTAs of a cluster, each element is in one tile, and no tile has a step
// of rows too many.
void check_row_tiles(const Problem& problem, const std::vector<int>& sizes, int columns, bool split) {
  const auto ranges = ranges_of(sizes, problem.m);
  std::vector<int> seen(size_t(problem.m) * problem.n);
  for (int rank = 0; rank < kCluster; ++rank) {
    RowTiles tiles(problem, columns, split, jax_ep::Coop());
    RowTile tile{};
    for (int pair = 0; tiles.find(pair, rank, &tile); ++pair) {
      const Range range = ranges[tile.group];
      expect(tile.row >= range.begin && tile.row_end == range.end, "a tile has rows of its group");
      expect(tile.k_end == (tile.group == problem.groups ? 0 : problem.k), "a tile has its contraction");
      const bool may_be_empty = split && rank == 1;
      expect(tile.rows % kRowStep == 0 && (tile.rows > 0 || may_be_empty), "a tile has a height for wgmma");
      expect(tile.rows <= (split ? kMaxGathered : kMaxRows), "a tile is not too high");
      expect(tile.row + tile.rows < tile.row_end + kRowStep, "no step of rows is wasted");
      for (int row = tile.row; row < std::min(tile.row + tile.rows, tile.row_end); ++row)
        for (int col = tile.col; col < std::min(tile.col + columns, problem.n); ++col)
          ++seen[size_t(row) * problem.n + col];
    }
  }
  for (const int times : seen) expect(times == 1, "every element is in one tile");
}

// Numbers of pairs may be left out: each CTA finds what it takes.
void check_any_pairs(const Problem& problem, std::mt19937& random) {
  RowTiles all(problem, kTileColumns, false, jax_ep::Coop()), some(problem, kTileColumns, false, jax_ep::Coop());
  RowTile one{}, other{};
  int next = 0;
  for (int pair = 0; all.find(pair, 1, &one); ++pair) {
    if (pair < next) continue;
    expect(some.find(pair, 1, &other) && one.row == other.row && one.col == other.col && one.rows == other.rows,
           "a tile is where its number says");
    next = pair + std::uniform_int_distribution(1, 20)(random);
  }
}

TEST_CASE("every element of a result is in exactly one tile with its contraction") {
  std::mt19937 random(20260701);
  const auto draw = [&](int from, int to) { return std::uniform_int_distribution(from, to)(random); };
  for (int i = 0; i < 300; ++i) {
    const auto grouping = static_cast<Grouping>(i % 3);
    const int m = draw(1, 900), n = draw(1, 900), k = draw(1, 2000), sms = draw(2, 40);
    std::vector<int> sizes(grouping == Grouping::none ? 1 : draw(1, 9));
    for (int& size : sizes) size = draw(-20, 300);
    const int groups = static_cast<int>(sizes.size());
    Config config = plan_fixed(Shape{grouping, m, n, k, groups}, sms);
    config.band = draw(1, 3);
    expect(config.ctas % kCluster == 0 && config.ctas <= sms, "whole clusters");
    Problem problem{grouping, m, n, k, groups, sizes.data(), config.band};
    problem.split_k = config.split_k;
    const int ranks = draw(1, 4);
    const jax_ep::PairOrder order =
        draw(0, 1) ? jax_ep::PairOrder{0, 0, ranks} : jax_ep::own_rows_first(m / ranks, draw(0, ranks - 1), ranks);
    problem.pair_first = order.first;
    problem.pair_lead = order.lead;
    problem.pair_parts = order.parts;
    if (grouping == Grouping::none) sizes = {m};
    if (grouping == Grouping::m_grouped) {
      for (const int columns : {64, kTileColumns}) check_row_tiles(problem, sizes, columns, /*split=*/false);
      for (const int columns : {128, 256}) check_row_tiles(problem, sizes, columns, /*split=*/true);
      check_any_pairs(problem, random);
    }
    const Part all_at_once{0, config.ctas};
    const auto check = [&] {
      check_clusters(problem, config, all_at_once);
      check_cover(problem, config, sizes, all_at_once);
    };
    check();
    problem.split_k = false;
    for (const int block_n : {128, 192, 256}) {
      config.block_n = block_n;
      check();
    }
  }
}

}  // namespace
