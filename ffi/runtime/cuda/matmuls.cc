// Starts grouped matmuls, and loads the kernels of all matmuls.
#include "kernels/ops.h"
#include "runtime/cuda/grouped_matmul_launch.h"
#include "runtime/gpu/device_scope.h"
#include "runtime/gpu/kernel_launch.h"

namespace jax_ep {

std::optional<std::string> start_local(gpu::Stream stream, const gemm::GroupedMatmul& args) {
  return gemm::launch(args, stream);
}

std::optional<std::string> load_matmul_kernels() {
#define JAX_EP_LOAD(Args) &OverlapKernel<Args>::load,
  for (const auto load : {&gemm::load, JAX_EP_COLLECTIVE_MATMUL_OPS(JAX_EP_LOAD)})
    if (const cudaError_t error = load(); error != cudaSuccess) return cudaGetErrorString(error);
  return std::nullopt;
}

std::vector<uint64_t*> product_timelines(int device) {
  const gpu::DeviceScope scope(device);
  return gemm::timeline_words();
}

}  // namespace jax_ep
