// The kernels on rows of float32.
#include "runtime/gpu/define_kernels.h"

namespace jax_ep {

#define JAX_EP_INSTANTIATE(Args) template struct Kernel<float, Args>;
JAX_EP_ROW_OPS(JAX_EP_INSTANTIATE)

}  // namespace jax_ep
