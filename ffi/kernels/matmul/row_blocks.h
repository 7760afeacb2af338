// How a product's rows are cut into row blocks, each announced by a flag of its own.
#pragma once

#include "comm/heap.h"
#include "comm/layout.h"

namespace jax_ep {

constexpr int kBlockRows = Coop::lanes == 1 ? 16 : 128;  // on a GPU the rows of a tile of the product

struct RowBlocks {
  int rows, block_rows, chunks;

  // One flag is left for other news.
  JAX_EP_FN explicit RowBlocks(int rows)
      : rows(rows),
        block_rows(align_up((rows + kMaxFlags - 2) / (kMaxFlags - 1), kBlockRows)),
        chunks((rows + block_rows - 1) / block_rows) {}

  JAX_EP_FN int chunk_of(int row) const { return row / block_rows; }
  JAX_EP_FN Range chunk(int row_block) const {
    return {row_block * block_rows, smaller((row_block + 1) * block_rows, rows)};
  }
};

JAX_EP_FN Range overlap(Range a, Range b) { return {larger(a.begin, b.begin), smaller(a.end, b.end)}; }

}  // namespace jax_ep
