// matmul_all_reduce and matmul_reduce_scatter of two ranks, for every dtype and storage order. Compiled for sm_90a
// alone.
#include "kernels/collective_matmul/overlap_exchange.h"
#include "runtime/cuda/overlap_launch.h"

namespace jax_ep {

template struct OverlapKernel<MatmulExchangeArgs>;

}  // namespace jax_ep
