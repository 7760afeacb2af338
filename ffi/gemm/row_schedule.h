// Tiles of a product whose rows are in groups. A tile has no more rows than it needs ("swap AB": multiply_swapped.h).
//
// A group of many rows is cut into tiles of nearly equal height, in steps of kRowStep, so that less than one step of a
// group is multiplied in vain. Clusters take tile pairs: two tiles of the same rows, side by side.
#pragma once

#include "gemm/problem.h"

namespace jax_ep::gemm {

constexpr int kRowStep = 16;                // rows by which tiles differ
constexpr int kMaxRows = 256;               // of a tile: more sums would not fit into the registers
constexpr int kMaxGathered = kMaxRows / 2;  // where CTAs of a cluster split the rows
constexpr int kTileColumns = 128;           // of one matrix of weights; a gated product has 64 of each

// What a CTA computes in one step: out[row.., col..]. The rows before `row_end` belong to the group.
struct RowTile {
  int group;
  int row, row_end;
  int rows;  // to multiply: a multiple of kRowStep
  int col;   // may lie past the last column
  static constexpr int k_begin = 0;
  int k_end;
};

// Finds tile pairs by number. The pairs of a group have successive numbers. Every warp that works on tiles has its own
// RowTiles.
class RowTiles {
 public:
  // Tiles have `tile_columns` columns. The tiles of a pair are side by side, or, if `split`, one above the other.
  JAX_EP_FN RowTiles(const Problem& problem, int tile_columns, bool split)
      : problem_(problem), tile_columns_(tile_columns), split_(split) {
    columns_ = ceil_div(problem.n, tile_columns * (split ? 1 : kCluster));
    open_group(0);
  }

  // Finds the tile of one CTA in a pair. False after the last pair. `pair` must not fall from call to call.
  JAX_EP_FN bool find(int pair, int cta_in_cluster, RowTile* tile) {
    while (pair - first_ >= tiles_ * columns_) {
      if (group_ == problem_.groups) return false;
      first_ += tiles_ * columns_;
      open_group(group_ + 1);
    }
    *tile = locate(pair - first_, cta_in_cluster);
    return true;
  }

 private:
  // The rows after the last group count as one more group, without a contraction. Sizes are limited to the rows left.
  JAX_EP_FN void open_group(int group) {
    group_ = group;
    row_ = row_end_;
    const int left = problem_.m - row_;
    row_end_ += group < problem_.groups ? smaller(larger(problem_.group_sizes[group], 0), left) : left;
    steps_ = ceil_div(row_end_ - row_, kRowStep);
    tiles_ = ceil_div(steps_, kMaxRows / kRowStep);
  }

  // Walks down the tiles of a band, column by column. If tiles cannot be equal, the first have one step more.
  JAX_EP_FN RowTile locate(int i, int cta_in_cluster) const {
    const int band = i / (problem_.band * columns_), inside = i - band * problem_.band * columns_;
    const int first = band * problem_.band, count = smaller(problem_.band, tiles_ - first);
    const int tile = first + inside % count, each = steps_ / tiles_, more = steps_ % tiles_;
    RowTile result;
    result.group = group_;
    result.row = row_ + (tile * each + smaller(tile, more)) * kRowStep;
    result.row_end = row_end_;
    const int steps = each + (tile < more), upper = (steps + 1) / 2, column = inside / count;
    if (split_) {
      result.row += cta_in_cluster * upper * kRowStep;
      result.rows = (cta_in_cluster == 0 ? upper : steps - upper) * kRowStep;
      result.col = column * tile_columns_;
    } else {
      result.rows = steps * kRowStep;
      result.col = (column * kCluster + cta_in_cluster) * tile_columns_;
    }
    result.k_end = group_ < problem_.groups ? problem_.k : 0;
    return result;
  }

  const Problem& problem_;
  int tile_columns_;
  bool split_;
  int columns_;                    // of tile pairs
  int first_ = 0;                  // tile pair of the open group
  int group_, row_, row_end_ = 0;  // of the open group
  int steps_, tiles_;              // of its rows
};

}  // namespace jax_ep::gemm
