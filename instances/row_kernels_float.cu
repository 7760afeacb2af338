#include "runtime/gpu/define_kernels.h"

namespace jax_ep {
#define JAX_EP_INSTANTIATE(Args) template struct Kernel<float, Args>;
JAX_EP_VALUE_KERNELS(JAX_EP_INSTANTIATE)
}
