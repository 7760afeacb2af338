// rows1 w1 + rows2 w2 for rows in groups, w stored [n, k], in one kernel that swaps the operands (swap_ab.h): one sum
// of twice the contraction, rounded once. It is the cotangent of the rows that gate and up multiply, without two more
// results and the pass over memory that adds them.
#pragma once

#include "gemm/swap_ab.h"

namespace jax_ep::gemm {

// The rows and the weights of both products; weights are stored [n, k].
struct TwoProducts {
  static constexpr int kColumns = kTileColumns, kTerms = 2;
  static constexpr bool kMn = false;
  OneMatrix<kMn> first, second;

  JAX_EP_FN const CUtensorMap& rows(int term) const { return (term == 0 ? first : second).row_map; }
  JAX_EP_FN int slices(const Problem& problem, const RowTile& tile) const { return first.slices(problem, tile); }
  JAX_EP_FN void load(char* to, const RowTile& tile, int term, int k, int slices, uint64_t* full) const {
    (term == 0 ? first : second).load(to, tile, term, k, slices, full);
  }
};

// The rows [M, K] and weights [groups, N, K] map slices, `out_map` a warp's box; `counter` is zero.
template <class T>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    summed_kernel(const __grid_constant__ CUtensorMap first_rows, const __grid_constant__ CUtensorMap first,
                  const __grid_constant__ CUtensorMap second_rows, const __grid_constant__ CUtensorMap second,
                  const __grid_constant__ CUtensorMap out_map, void* out, uint32_t* counter,
                  const __grid_constant__ Problem problem) {
  extern __shared__ __align__(1024) char memory[];
  multiply_swapped<T>(memory, TwoProducts{{first_rows, first}, {second_rows, second}},
                      StoreSums<T>{out_map, static_cast<T*>(out)}, counter, problem);
}

}  // namespace jax_ep::gemm
