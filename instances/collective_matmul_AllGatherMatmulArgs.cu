#include "runtime/cuda/overlap_launch.h"

namespace jax_ep {
template struct OverlapKernel<AllGatherMatmulArgs>;
}
