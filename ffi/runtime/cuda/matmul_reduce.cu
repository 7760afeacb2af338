// matmul_all_reduce and matmul_reduce_scatter for every dtype and storage order. Compiled for sm_90a alone.
#include "kernels/collective_matmul/overlap.h"
#include "runtime/cuda/overlap_launch.h"

namespace jax_ep {

extern template struct OverlapKernel<MatmulExchangeArgs>;
template struct OverlapKernel<MatmulReduceArgs>;

}  // namespace jax_ep
