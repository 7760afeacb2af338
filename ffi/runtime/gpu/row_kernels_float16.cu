// The kernels on rows of float16.
#include "runtime/gpu/define_kernels.h"

namespace jax_ep {

#define JAX_EP_INSTANTIATE(Args) template struct Kernel<Float16, Args>;
JAX_EP_ROW_OPS(JAX_EP_INSTANTIATE)

}  // namespace jax_ep
