// Which tiles a block computes, in which order. Every warp of a block walks the same list by itself.
#pragma once

#include "gemm/problem.h"

namespace jax_ep::gemm {

// Clusters take the tiles of a group, then of the next, round-robin; the groups' sizes are read on the way.
class Schedule {
 public:
  JAX_EP_GEMM_FN Schedule(const Problem& problem, int block_n, int block, int blocks)
      : problem_(problem), block_n_(block_n) {
    const int cluster = problem.cluster_m * problem.cluster_n;
    next_ = block / cluster;
    rank_ = block % cluster;
    step_ = blocks / cluster;
    open_group(0);
  }

  // False behind the last tile. All blocks of a cluster get tiles of one group and one range of the contraction; a tile
  // may lie wholly outside the matrix.
  JAX_EP_GEMM_FN bool next(Tile* tile) {
    while (next_ - first_ >= units_) {
      if (tile_.group == last_group()) return false;
      first_ += units_;
      open_group(tile_.group + 1);
    }
    place(next_ - first_, tile);
    next_ += step_;
    return true;
  }

 private:
  // With groups of rows, the rows behind the last group are one more, without contraction.
  JAX_EP_GEMM_FN int last_group() const {
    if (problem_.grouping == Grouping::none) return 0;
    return problem_.grouping == Grouping::rows ? problem_.groups : problem_.groups - 1;
  }

  // Sizes that would leave the matrix are cut off.
  JAX_EP_GEMM_FN int size_of(int group, int left) const {
    return group < problem_.groups ? smaller(larger(problem_.group_sizes[group], 0), left) : left;
  }

  JAX_EP_GEMM_FN void open_group(int group) {
    tile_ = {group, 0, 0, problem_.m, 0, problem_.k};
    if (problem_.grouping == Grouping::rows) {
      tile_.row = start_;
      start_ += size_of(group, problem_.m - start_);
      tile_.row_end = start_;
      if (group == problem_.groups) tile_.k_end = 0;
    } else if (problem_.grouping == Grouping::contraction) {
      tile_.k_begin = start_;
      start_ += size_of(group, problem_.k - start_);
      tile_.k_end = start_;
    }
    units_m_ = ceil_div(tile_.row_end - tile_.row, kBlockM * problem_.cluster_m);
    units_n_ = ceil_div(problem_.n, block_n_ * problem_.cluster_n);
    units_ = units_m_ * units_n_;
  }

  // Down the rows of a band, then to the next column.
  JAX_EP_GEMM_FN void place(int unit, Tile* tile) const {
    const int band = unit / (problem_.band * units_n_), inside = unit - band * problem_.band * units_n_;
    const int rows = smaller(problem_.band, units_m_ - band * problem_.band);
    const int column = inside / rows, row = band * problem_.band + inside - column * rows;
    *tile = tile_;
    tile->row += (row * problem_.cluster_m + (problem_.cluster_m > 1 ? rank_ : 0)) * kBlockM;
    tile->col = (column * problem_.cluster_n + (problem_.cluster_n > 1 ? rank_ : 0)) * block_n_;
  }

  const Problem& problem_;
  int block_n_;
  int next_, step_, rank_;     // in units: the tiles of a cluster
  int first_ = 0, units_ = 0;  // of the open group
  int units_m_ = 0, units_n_ = 0;
  int start_ = 0;  // where the next group starts
  Tile tile_{};    // the open group's first
};

}  // namespace jax_ep::gemm
