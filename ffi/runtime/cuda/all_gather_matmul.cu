// all_gather_matmul for every dtype and storage order. Compiled for sm_90a alone.
#include "kernels/collective_matmul/overlap.h"
#include "runtime/cuda/overlap_launch.h"

namespace jax_ep {

template struct OverlapKernel<AllGatherMatmulArgs>;

}  // namespace jax_ep
