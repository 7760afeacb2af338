// Loads the kernels of all matmuls.
#include "kernels/ops.h"
#include "runtime/cuda/grouped_matmul_launch.h"
#include "runtime/gpu/device_scope.h"
#include "runtime/gpu/kernel_launch.h"

namespace jax_ep {

std::optional<std::string> load_matmul_kernels() {
#define JAX_EP_LOAD(Args) &OverlapKernel<Args>::load,
  for (const auto load : {&gemm::load, JAX_EP_COLLECTIVE_MATMUL_OPS(JAX_EP_LOAD)})
    if (auto error = gpu::explain(load())) return error;
  return std::nullopt;
}

}  // namespace jax_ep
