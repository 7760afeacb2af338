// matmul_all_reduce and matmul_reduce_scatter for every dtype and storage order. Compiled for sm_90a alone.
#include "kernels/matmul/overlap.h"
#include "runtime/cuda/overlap_launch.h"

namespace jax_ep {

// The order of tiles gives all owners rows to sum at any time.
static RankProduct product_of(const MatmulReduceArgs& args, const Comm& comm) {
  return {args.m, args.a, args.partial, {0, 0, args.reduce_scatter ? comm.size : 1}};
}

extern template struct OverlapKernel<MatmulExchangeArgs>;
template struct OverlapKernel<MatmulReduceArgs>;

}  // namespace jax_ep
