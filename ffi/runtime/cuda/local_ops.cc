// Starts the local ops, which are the products of ffi/gemm.
#include "kernels/ops.h"
#include "runtime/cuda/grouped_matmul_launch.h"
#include "runtime/gpu/kernel_launch.h"

namespace jax_ep {

template <class Args>
std::optional<std::string> start_local(gpu::Stream stream, const Args& args) {
  return gemm::launch(args, stream);
}
#define JAX_EP_START(Args) template std::optional<std::string> start_local(gpu::Stream, const Args&);
JAX_EP_LOCAL_OPS(JAX_EP_START)

std::optional<std::string> load_local_kernels() {
#define JAX_EP_LOAD(Args) &OverlapKernel<Args>::load,
  for (const auto load : {&gemm::load, JAX_EP_COLLECTIVE_MATMUL_OPS(JAX_EP_LOAD)})
    if (const cudaError_t error = load(); error != cudaSuccess) return cudaGetErrorString(error);
  return std::nullopt;
}

}  // namespace jax_ep
