// The tiles of a CTA, in order. Every warp of a CTA computes the same list.
//
// Clusters take tile pairs. The tiles of a pair are on top of each other and share rhs, the larger operand. If a group
// has an odd number of rows of tiles, pairs of the last row are side by side, so that no tile is wasted.
#pragma once

#include "gemm/problem.h"

namespace jax_ep::gemm {

// Clusters take the tiles of one group after the other, round-robin. Groups' sizes are read on the way.
class Schedule {
 public:
  JAX_EP_FN Schedule(const Problem& problem, int block_n, Part cta) : problem_(problem), block_n_(block_n) {
    const int cluster = cta.index / kCluster;
    cta_in_cluster_ = cta.index % kCluster;
    step_ = cta.count / kCluster;
    next_ = cluster;
    open_group(0);
  }

  // False after the last tile. Both CTAs of a cluster get tiles of one group and one range of the contraction. A tile
  // may be outside the matrix.
  JAX_EP_FN bool next(Tile* tile) {
    while (next_ - first_ >= tile_pairs_) {
      if (tile_.group == last_group()) return false;
      first_ += tile_pairs_;
      open_group(tile_.group + 1);
    }
    locate(next_ - first_, tile);
    next_ += step_;
    tile->last = next_ >= tile_pairs_;
    return true;
  }

 private:
  // If m-grouped, the rows after the last group are one more group, without a contraction.
  JAX_EP_FN int last_group() const {
    if (problem_.grouping == Grouping::none) return 0;
    return problem_.grouping == Grouping::m_grouped ? problem_.groups : problem_.groups - 1;
  }

  JAX_EP_FN int size_of(int group, int left) const {
    return group < problem_.groups ? smaller(larger(problem_.group_sizes[group], 0), left) : left;
  }

  JAX_EP_FN void open_group(int group) {
    tile_ = {group, 0, 0, problem_.m, 0, problem_.k, Common::rhs, 0, 0, false};
    if (problem_.grouping == Grouping::m_grouped) {
      tile_.row = start_;
      start_ += size_of(group, problem_.m - start_);
      tile_.row_end = start_;
      if (group == problem_.groups) tile_.k_end = 0;
    } else if (problem_.grouping == Grouping::k_grouped) {
      tile_.k_begin = start_;
      start_ += size_of(group, problem_.k - start_);
      tile_.k_end = start_;
    }
    rows_ = ceil_div(tile_.row_end - tile_.row, kBlockM);
    columns_ = ceil_div(problem_.n, block_n_);
    tile_pairs_ = problem_.split_k ? rows_ * columns_ : rows_ / 2 * columns_ + rows_ % 2 * ceil_div(columns_, 2);
  }

  // Goes through a band two columns at a time, which have as many tile pairs as the band has rows.
  JAX_EP_FN void locate(int tile_pair, Tile* tile) const {
    if (problem_.split_k) return locate_split(tile_pair, tile);
    const int band = tile_pair / (problem_.band * columns_), inside = tile_pair - band * problem_.band * columns_;
    const int first_row = band * problem_.band * 2, rows = smaller(problem_.band * 2, rows_ - first_row);
    const int first_column = inside / rows * 2, upright = inside % rows - rows % 2, pairs = larger(rows / 2, 1);
    *tile = tile_;
    const bool stands = upright >= 0;
    tile->common = stands ? Common::rhs : Common::lhs;
    const int row = stands ? pair_at(first_row / 2 + upright % pairs) * 2 + cta_in_cluster_ : first_row + rows - 1;
    const int column = first_column + (stands ? upright / pairs : cta_in_cluster_);
    tile->row += row * kBlockM;
    tile->out_col = tile->col = column * block_n_;
    tile->out_end = tile->col + block_n_;
  }

  // Both CTAs take the same number of steps of the contraction. The last step may be past the end. Each stores half of
  // the columns.
  JAX_EP_FN void locate_split(int tile_pair, Tile* tile) const {
    *tile = tile_;
    tile->common = Common::tile;
    tile->row += tile_pair % rows_ * kBlockM;
    tile->col = tile_pair / rows_ * block_n_;
    const int half = ceil_div(ceil_div(tile_.k_end - tile_.k_begin, kBlockK), 2) * kBlockK;
    tile->k_begin += cta_in_cluster_ * half;
    tile->k_end = tile->k_begin + half;
    tile->out_col = tile->col + cta_in_cluster_ * block_n_ / 2;
    tile->out_end = tile->out_col + block_n_ / 2;
  }

  JAX_EP_FN int pair_at(int i) const {
    if (problem_.grouping != Grouping::none) return i;
    const int pairs = rows_ / 2, lead = problem_.pair_lead, parts = problem_.pair_parts;
    if (i < lead) return (problem_.pair_first + i) % pairs;
    i -= lead;
    // If pairs are left over, the last parts have one more pair each, at their end. So no part begins later than in an
    // equal division.
    const int each = (pairs - lead) / parts, more = (pairs - lead) % parts, regular = parts - more;
    const int part = i < each * parts ? i % parts : i - each * parts + regular,
              turn = i < each * parts ? i / parts : each;
    return (problem_.pair_first + lead + part * each + larger(part - regular, 0) + turn) % pairs;
  }

  const Problem& problem_;
  int block_n_;
  int next_, step_;  // in tile pairs
  int cta_in_cluster_;
  int first_ = 0, tile_pairs_ = 0;  // of the open group
  int rows_ = 0, columns_ = 0;      // of tiles of the open group
  int start_ = 0;                   // where the next group starts
  Tile tile_{};                     // the first of the open group
};

}  // namespace jax_ep::gemm
