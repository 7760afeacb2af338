// An m-grouped product by plain loops, in the tiles that a cluster has: where there is no core for it.
#pragma once

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
