// Tiles of a product whose rows are in groups, with swapped operands (multiply_swapped.h).
//
// A group is cut into tiles of nearly equal height, in steps of kRowStep, so that a group wastes less than one step.
// Clusters take tile pairs: two tiles of the same rows, side by side, or, if `split`, one above the other.
#pragma once

#include "comm/platform.h"
#include "gemm/problem.h"

namespace jax_ep::gemm {

constexpr int kRowStep = 16;                // tile heights are multiples of this
constexpr int kMaxRows = 256;               // of a tile: more sums do not fit into the registers
constexpr int kMaxGathered = kMaxRows / 2;  // of a CTA's tile, if the CTAs of a cluster split the rows
constexpr int kTileColumns = 128;           // of one matrix of weights; a gated product has 64 of each

// One step of a CTA: out[row.., col..]. The rows before `row_end` belong to the group.
struct alignas(16) RowTile {
  int group;
  int row, row_end;
  int rows;  // to multiply: a multiple of kRowStep
  int col;   // may be past the last column
  int k_end;
  static constexpr int k_begin = 0;
};

// Finds tile pairs by number. The pairs of a group have successive numbers. Each lane of a warp holds one of successive
// groups, so that a warp skips many empty groups at once.
class RowTiles {
 public:
  // Tiles have `tile_columns` columns. The tiles of a pair are side by side, or, if `split`, one above the other.
  JAX_EP_FN RowTiles(const Problem& problem, int tile_columns, bool split, const Coop& coop)
      : problem_(problem), tile_columns_(tile_columns), split_(split), coop_(coop) {
    columns_ = ceil_div(problem.n, tile_columns * (split ? 1 : kCluster));
    open(0);
  }

  // Finds the tile of one CTA in a pair. False after the last pair. `pair` must not decrease between calls, and is
  // equal on all lanes. Lanes may ask for different CTAs.
  JAX_EP_FN bool find(int pair, int cta_in_cluster, RowTile* tile) {
    uint64_t holders;
    while (!(holders = coop_.ballot(pair < held_.first + tiles_of(held_) * columns_))) {
      if (group_ + Coop::lanes > problem_.groups) return false;
      open(group_ + Coop::lanes);
    }
    const int holder = lowest_bit(holders);
    *tile = locate(coop_.from_lane(held_, holder), group_ + holder, pair, cta_in_cluster);
    return true;
  }

 private:
  struct Group {
    int first;  // tile pair
    int row, row_end;
  };

  JAX_EP_FN static int steps_of(const Group& x) { return ceil_div(x.row_end - x.row, kRowStep); }
  JAX_EP_FN static int tiles_of(const Group& x) { return ceil_div(steps_of(x), kMaxRows / kRowStep); }

  // The rows after the last group are one more group, without a contraction. Sizes are limited to the rows left.
  JAX_EP_FN void open(int group) {
    const int mine = group + coop_.lane, left = problem_.m - next_row_;
    int size = mine < problem_.groups ? smaller(larger(problem_.group_sizes[mine], 0), left) : 0, total;
    if (mine == problem_.groups) size = left;
    const uint32_t before = static_cast<uint32_t>(coop_.exclusive_scan(size, &total)), most = left;
    const int row = before < most ? before : most;
    group_ = group;
    held_.row = next_row_ + row;
    held_.row_end = held_.row + smaller(size, left - row);
    next_row_ = coop_.from_lane(held_.row_end, Coop::lanes - 1);
    held_.first = next_first_ + coop_.exclusive_scan(tiles_of(held_) * columns_, &total);
    next_first_ += total;
  }

  // Goes down the tiles of a band, column by column. If tiles cannot be equal, the first have one step more.
  JAX_EP_FN RowTile locate(const Group& x, int group, int pair, int cta_in_cluster) const {
    const int steps_in_all = steps_of(x), tiles = tiles_of(x), i = pair - x.first;
    const int band = i / (problem_.band * columns_), inside = i - band * problem_.band * columns_;
    const int first = band * problem_.band, count = smaller(problem_.band, tiles - first);
    const int tile = first + inside % count, each = steps_in_all / tiles, more = steps_in_all % tiles;
    RowTile result;
    result.group = group;
    result.row = x.row + (tile * each + smaller(tile, more)) * kRowStep;
    result.row_end = x.row_end;
    const int steps = each + (tile < more), upper = (steps + 1) / 2, column = inside / count;
    if (split_) {
      result.row += cta_in_cluster * upper * kRowStep;
      result.rows = (cta_in_cluster == 0 ? upper : steps - upper) * kRowStep;
      result.col = column * tile_columns_;
    } else {
      result.rows = steps * kRowStep;
      result.col = (column * kCluster + cta_in_cluster) * tile_columns_;
    }
    result.k_end = group < problem_.groups ? problem_.k : 0;
    return result;
  }

  const Problem& problem_;
  int tile_columns_;
  bool split_;
  Coop coop_;
  int columns_;                        // of tile pairs
  int group_;                          // of the first lane
  Group held_{};                       // of this lane
  int next_row_ = 0, next_first_ = 0;  // after the last lane's group
};

}  // namespace jax_ep::gemm
