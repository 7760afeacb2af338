// What runs beside a product whose rows are in groups (swap_ab.h): a kernel before it on the stream that still brings
// its rows, or one behind it that already takes its result. They tell each other by words in the rank's memory, which
// are zero when the first of them begins.
#pragma once

#include <cstdint>

#include "comm/integers.h"
#include "comm/platform.h"
#include "gemm/problem.h"

namespace jax_ep::gemm {

struct Beside {
  static constexpr uint64_t kNothing = 2;

  // By the kernel before: how many rows are here, of each kBlockM of the left operand; that the sizes of the groups are
  // written; and that it is over: kNothing if it brings no more rows, so that no more tiles are taken. Null: all are
  // here.
  const uint64_t* arrived = nullptr;
  const uint64_t* laid_out = nullptr;
  const uint64_t* over = nullptr;
  // For the kernel behind: how many values are written, of each kBlockM rows of the result. Null: nobody asks.
  uint64_t* stored = nullptr;
  // The first `leaving` CTAs, an even number, take no more tiles when only `tail` tile pairs are left, and free their
  // SMs for the kernel behind.
  int leaving = 0;
  int tail = 0;
};

// How many words a matrix of so many rows has.
JAX_EP_CONSTANT_FN int row_blocks(int rows) { return (rows + kBlockM - 1) / kBlockM; }

// Calls visit(block, rows) for the parts of the rows [begin, end) in row blocks.
template <class Visit>
JAX_EP_FN void each_row_block(int begin, int end, Visit visit) {
  while (begin < end) {
    const int block = begin / kBlockM, until = smaller(end, (block + 1) * kBlockM);
    visit(block, until - begin);
    begin = until;
  }
}

}  // namespace jax_ep::gemm
