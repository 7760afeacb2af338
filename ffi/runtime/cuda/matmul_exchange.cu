// matmul_all_reduce and matmul_reduce_scatter of two ranks, for every dtype and storage order. Compiled for sm_90a
// alone.
#include "kernels/matmul/overlap_exchange.h"
#include "runtime/cuda/overlap_launch.h"

namespace jax_ep {

// The order of tiles gives both ranks tiles to add at any time.
static RankProduct product_of(const MatmulExchangeArgs& args, const Comm& comm) {
  return {args.m, args.a, args.partial, {0, 0, args.reduce_scatter ? comm.size : 1}};
}

template struct OverlapKernel<MatmulExchangeArgs>;

}  // namespace jax_ep
