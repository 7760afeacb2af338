// dispatch_ragged_dot for every dtype that the core multiplies. Compiled for sm_90a alone.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "gemm/tensor_map.h"
#include "kernels/moe/overlap_dot.h"
#include "runtime/gpu/kernel_launch.h"

namespace jax_ep {
namespace {

using DotKernel = void (*)(CUtensorMap, CUtensorMap, CUtensorMap, gemm::Problem, DotWork);

template <class In>
DotKernel kernel_for(int block_n) {
  return block_n == 128 ? dispatch_dot_kernel<In, 128> : dispatch_dot_kernel<In, 256>;
}
DotKernel kernel_for(DType dtype, int block_n) {
  return dtype == DType::bfloat16 ? kernel_for<__nv_bfloat16>(block_n) : kernel_for<__half>(block_n);
}

constexpr int shared_bytes(int block_n) {
  return block_n == 128 ? sizeof(gemm::Shared<128, DotLookout>) : sizeof(gemm::Shared<256, DotLookout>);
}

struct Maps {
  CUtensorMap received, rhs, product;
};

std::optional<std::string> describe(const DispatchDotArgs& x, int ranks, Maps* maps) {
  if (x.capacity == 0) return std::nullopt;  // there are no tiles, and TMA describes nothing empty
  const int local = x.num_experts / ranks;
  if (const auto error =
          gemm::describe_boxes({x.received, x.dtype, x.hidden, x.capacity, 1}, gemm::kSlice, &maps->received))
    return "received: " + *error;
  if (const auto error = gemm::describe_boxes({x.rhs, x.dtype, x.columns, x.hidden, local}, gemm::kSlice, &maps->rhs))
    return "rhs: " + *error;
  if (const auto error =
          gemm::describe_boxes({x.product, x.dtype, x.columns, x.capacity, 1}, gemm::kOutRows, &maps->product))
    return "product: " + *error;
  return std::nullopt;
}

}  // namespace

template <>
std::optional<std::string> ProductKernel<DispatchDotArgs>::start(const DotConfig& config, gpu::Stream stream,
                                                                 const Comm& comm, const DispatchDotArgs& args) {
  if (args.dtype == DType::float32) return "tokens must be bfloat16 or float16";
  Maps maps{};
  if (const auto error = describe(args, comm.size, &maps)) return error;
  gemm::Problem problem = product_of(args, comm.size, config.product.band);
  problem.split_k = config.product.split_k;
  const DotWork work{comm, args, config.dispatching, config.senders_per_cta, config.head};
  const DotKernel kernel = kernel_for(args.dtype, config.product.block_n);
  const int bytes = shared_bytes(config.product.block_n);
  cudaError_t error =
      cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error == cudaSuccess) {
    kernel<<<config.product.blocks, gemm::kThreads, bytes, stream>>>(maps.received, maps.rhs, maps.product, problem,
                                                                     work);
    error = cudaGetLastError();
  }
  if (error == cudaSuccess) return std::nullopt;
  static_cast<void>(cudaGetLastError());  // XLA must not stumble over it
  return config.describe() + ": " + cudaGetErrorString(error);
}

template <>
gpu::Error ProductKernel<DispatchDotArgs>::load() {
  int device = 0, major = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error != cudaSuccess || major != 9) return error;
  for (const DType dtype : {DType::bfloat16, DType::float16})
    for (const int block_n : {128, 256}) {
      cudaFuncAttributes attributes;
      error = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel_for(dtype, block_n)));
      if (error != cudaSuccess) return error;
    }
  return cudaSuccess;
}

}  // namespace jax_ep
