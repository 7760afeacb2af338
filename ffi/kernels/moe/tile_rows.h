// The rows of an m-grouped product's tiles: which a tile multiplies and stores, by which words warps of a rank tell
// each other within an op that they are written, and the product by plain loops, where there is no core for it.
#pragma once

#include "comm/op.h"
#include "gemm/beside.h"
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

// Words that count, for each row block of a matrix, how many values of it are written. They are zero before anybody
// counts.
class CountedRows {
 public:
  // The words of `rows` rows of `columns` values.
  JAX_EP_FN CountedRows(Op& op, uint64_t* words, int rows, int columns)
      : op_(op), words_(words), rows_(rows), columns_(columns) {}

  // Waits until these rows are written: not, if the op has failed.
  JAX_EP_FN void await(Range rows) const {
    if (rows.begin >= rows.end) return;
    const int first = rows.begin / gemm::kBlockM, blocks = (rows.end - 1) / gemm::kBlockM + 1 - first;
    op_.wait_counted(&words_[first], blocks, [&](int i) {
      const int left = rows_ - (first + i) * gemm::kBlockM;
      return static_cast<uint64_t>(smaller(gemm::kBlockM, left)) * static_cast<uint64_t>(columns_);
    });
  }
  // Whole rows are written. One lane calls.
  JAX_EP_FN void count(Range rows) const {
    gemm::each_row_block(rows.begin, rows.end, [&](int block, int part) {
      fetch_add(&words_[block], static_cast<uint64_t>(part) * static_cast<uint64_t>(columns_));
    });
  }

 private:
  Op& op_;
  uint64_t* const words_;
  const int rows_, columns_;
};

// A part of the coops zeroes its share of some words.
JAX_EP_FN void clear_words(const Coop& coop, uint64_t* words, int count, Part part) {
  const int step = part.count * Coop::lanes;
  for (int i = part.index * Coop::lanes + coop.lane; i < count; i += step) words[i] = 0;
}

// Calls visit(tile) for the share of both CTAs of a cluster, in tiles as wide as the result; before(tile) and
// after(tile) around it, and nothing any more once the first says false.
template <class Before, class Visit, class After>
JAX_EP_FN void each_tile(const gemm::Problem& problem, gemm::Share share, Before before, Visit visit, After after) {
  for (const int last = share.cta + gemm::kCluster; share.cta < last; ++share.cta) {
    gemm::Schedule schedule(problem, problem.n, share);
    for (gemm::Tile tile; schedule.next(&tile);) {
      if (tile.col >= problem.n) continue;
      if (!before(tile)) return;
      visit(tile);
      after(tile);
    }
  }
}

// A tile of a product: zeros behind the last group.
template <class T>
JAX_EP_FN void multiply_tile(const GroupedFactors& factors, char* product, const gemm::Tile& tile) {
  const Range rows = multiplied_rows(tile), stored = stored_rows(tile);
  const int n = factors.b.n;
  T* const out = reinterpret_cast<T*>(product) + int64_t{tile.row} * n;
  if (rows.begin < rows.end) {
    const auto [a, b] = factors.at(tile.row, tile.group, sizeof(T));
    multiply_rows(reinterpret_cast<const T*>(a), b, out, rows.end - rows.begin);
  } else {
    for (int64_t i = 0; i < int64_t{stored.end - stored.begin} * n; ++i) from_float(0.0f, &out[i]);
  }
}

}  // namespace jax_ep
