// The rows of an m-grouped product's tiles: which a tile multiplies and stores, by which words warps of a rank tell
// each other within an op that they are written, and the product by plain loops, where there is no core for it.
#pragma once

#include "comm/op.h"
#include "gemm/schedule.h"
#include "rows/plain_product.h"

namespace jax_ep {

// The rows that a tile multiplies: none behind the last expert's, where the product is zero.
JAX_EP_FN Range multiplied_rows(const gemm::Tile& tile) {
  if (tile.k_begin >= tile.k_end) return {tile.row, tile.row};
  return {tile.row, smaller(tile.row + gemm::kBlockM, tile.row_end)};
}
// Those that it stores.
JAX_EP_FN Range stored_rows(const gemm::Tile& tile) {
  return {tile.row, smaller(tile.row + gemm::kBlockM, tile.row_end)};
}

// A word for each row block, kBlockM rows from a multiple of kBlockM on: it counts what of the block is written, and
// becomes a flag with the last. Some coop clears the words, and notes it, before anybody counts or waits.
class ReadyRows {
 public:
  // The words of `rows` rows.
  JAX_EP_FN ReadyRows(Op& op, uint64_t* words, int rows) : op_(op), words_(words), rows_(rows) {}

  JAX_EP_CONSTANT_FN static int blocks(int rows) { return (rows + gemm::kBlockM - 1) / gemm::kBlockM; }

  // Waits until these rows are here: at once, if the op has failed.
  JAX_EP_FN void await(Range rows) const {
    if (rows.begin >= rows.end) return;
    const int first = rows.begin / gemm::kBlockM;
    op_.wait_noted(&words_[first], (rows.end - 1) / gemm::kBlockM + 1 - first);
  }

  // A lane counts a row that is written, of which there are `end` in all.
  JAX_EP_FN void count(int row, int end) const {
    const int block = row / gemm::kBlockM;
    op_.note_when_whole(&words_[block], 1, smaller(gemm::kBlockM, end - block * gemm::kBlockM));
  }
  // A lane counts rows of which so many columns are written, of `all` in each.
  JAX_EP_FN void count(Range rows, int columns, int all) const {
    for (int begin = rows.begin; begin < rows.end;) {
      const int block = begin / gemm::kBlockM, first = block * gemm::kBlockM;
      const int end = smaller(rows.end, first + gemm::kBlockM);
      op_.note_when_whole(&words_[block], (end - begin) * columns, smaller(gemm::kBlockM, rows_ - first) * all);
      begin = end;
    }
  }

 private:
  Op& op_;
  uint64_t* const words_;
  const int rows_;
};

// A part of the coops zeroes its share of some words.
JAX_EP_FN void clear_words(const Coop& coop, uint64_t* words, int count, Part part) {
  const int step = part.count * Coop::lanes;
  for (int i = part.index * Coop::lanes + coop.lane; i < count; i += step) words[i] = 0;
}

// The share of both CTAs of a cluster of lhs [m, k] x rhs [groups, k, n], in tiles as wide as the result. before(tile)
// and after(tile) are called around each.
template <class T, class Before, class After>
JAX_EP_FN void multiply_plainly(const gemm::Problem& problem, const char* lhs, const char* rhs, char* product,
                                gemm::Share share, Before before, After after) {
  const int64_t matrix = int64_t{problem.k} * problem.n;
  for (const int last = share.cta + gemm::kCluster; share.cta < last; ++share.cta) {
    gemm::Schedule schedule(problem, problem.n, share);
    for (gemm::Tile tile; schedule.next(&tile);) {
      if (tile.col >= problem.n) continue;
      before(tile);
      const Range rows = multiplied_rows(tile), stored = stored_rows(tile);
      T* const out = reinterpret_cast<T*>(product) + int64_t{tile.row} * problem.n;
      if (rows.begin < rows.end)
        multiply_rows(reinterpret_cast<const T*>(lhs) + int64_t{tile.row} * problem.k,
                      Factor{rhs + tile.group * matrix * int64_t{sizeof(T)}, problem.k, problem.n, false}, out,
                      rows.end - rows.begin);
      else
        for (int64_t i = 0; i < int64_t{stored.end - stored.begin} * problem.n; ++i) from_float(0.0f, &out[i]);
      after(tile);
    }
  }
}

}  // namespace jax_ep
