// Words by which warps of a rank tell each other, within an op, which rows of a matrix are written.
#pragma once

#include "comm/op.h"
#include "gemm/problem.h"

namespace jax_ep {

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

}  // namespace jax_ep
