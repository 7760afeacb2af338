// Defines what kernel_launch.h declares of products: picks the kernel for dtypes, tiles and storage order, and
// describes arrays to TMA.
#pragma once

#include "gemm/tensor_map.h"
#include "kernels/matmul/overlap.h"
#include "runtime/gpu/kernel_launch.h"

namespace jax_ep {

template <class Args>
using OverlappedKernel = void (*)(CUtensorMap, CUtensorMap, CUtensorMap, void*, gemm::Problem, Work<Args>);

template <class In, class Out, class Args>
OverlappedKernel<Args> overlapped_for(int block_n, bool mn_b) {
  if (block_n == 128)
    return mn_b ? overlapped_kernel<In, Out, 128, true, Args> : overlapped_kernel<In, Out, 128, false, Args>;
  return mn_b ? overlapped_kernel<In, Out, 256, true, Args> : overlapped_kernel<In, Out, 256, false, Args>;
}

template <class Args>
OverlappedKernel<Args> overlapped_for(DType in, DType out, int block_n, bool mn_b) {
  if (in == DType::bfloat16)
    return out == DType::float32 ? overlapped_for<__nv_bfloat16, float, Args>(block_n, mn_b)
                                 : overlapped_for<__nv_bfloat16, __nv_bfloat16, Args>(block_n, mn_b);
  return out == DType::float32 ? overlapped_for<__half, float, Args>(block_n, mn_b)
                               : overlapped_for<__half, __half, Args>(block_n, mn_b);
}

template <class Args>
constexpr int overlapped_bytes(int block_n) {
  using Aux = typename AuxOf<Args>::Type;
  return block_n == 128 ? sizeof(gemm::Shared<128, Aux>) : sizeof(gemm::Shared<256, Aux>);
}

// The product that a rank computes: `a` [m, k] times b, to `out` [m, n]. product_of(args, comm) stands in the file of
// each op.
struct Product {
  int m;
  const char* a;
  char* out;
  PairOrder order;
};

// What only a gather is told: where its own rows are.
template <class Args>
std::optional<std::string> prepare(Work<Args>*) {
  return std::nullopt;
}
inline std::optional<std::string> prepare(Work<GatherMatmulArgs>* work) {
  const GatherMatmulArgs& args = work->args;
  return gemm::describe_boxes({args.a, args.operand_dtype, args.k, args.m, 1}, gemm::kSlice, &work->own);
}

// Two ranks may exchange their tiles instead of summing them beside the product.
template <class Args>
constexpr bool kMayExchange = std::is_same_v<Args, MatmulReduceArgs>;

template <class Args>
std::optional<std::string> ProductKernel<Args>::start(const PlanOf<Args>& config, gpu::Stream stream, const Comm& comm,
                                                      const Args& args) {
  if constexpr (kMayExchange<Args>)
    if (config.communicating == 0)
      return ProductKernel<MatmulExchangeArgs>::start(config, stream, comm, MatmulExchangeArgs{args});
  const Product product = product_of(args, comm);
  if (args.operand_dtype == DType::float32) return "operands must be bfloat16 or float16";
  const DType in = args.operand_dtype, out = args.dtype;
  CUtensorMap a, b, out_map;
  const int b_outer = args.transpose_b ? args.n : args.k, b_inner = args.transpose_b ? args.k : args.n;
  if (const auto error = gemm::describe_boxes(gemm::Matrices{product.a, in, args.k, product.m, 1}, gemm::kSlice, &a))
    return error;
  if (const auto error = gemm::describe_boxes(gemm::Matrices{args.b, in, b_inner, b_outer, 1}, gemm::kSlice, &b))
    return error;
  if (const auto error =
          gemm::describe_boxes(gemm::Matrices{product.out, out, args.n, product.m, 1}, gemm::kOutRows, &out_map))
    return error;
  gemm::Problem problem{gemm::Grouping::none, product.m, args.n, args.k, 1, nullptr, config.band};
  problem.split_k = config.split_k;
  problem.pair_first = product.order.first;
  problem.pair_lead = product.order.lead;
  problem.pair_parts = product.order.parts;
  // Gathers send from the first blocks, which start first; reductions wait for peers in the last.
  constexpr bool kSends = std::is_same_v<Args, GatherMatmulArgs>;
  const int first = kSends ? 0 : config.blocks() - config.communicating;
  Work<Args> work{comm, args, config.communicating, first, config.block_n, {}};
  if (const auto error = prepare(&work)) return error;
  const auto kernel = overlapped_for<Args>(args.operand_dtype, args.dtype, config.block_n, !args.transpose_b);
  const int bytes = overlapped_bytes<Args>(config.block_n);
  cudaError_t error =
      cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error == cudaSuccess) {
    kernel<<<config.blocks(), gemm::kThreads, bytes, stream>>>(a, b, out_map, product.out, problem, work);
    error = cudaGetLastError();
  }
  if (error == cudaSuccess) return std::nullopt;
  static_cast<void>(cudaGetLastError());  // XLA must not stumble over it
  return config.describe() + ": " + cudaGetErrorString(error);
}

template <class Args>
gpu::Error ProductKernel<Args>::load() {
  int device = 0, major = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error != cudaSuccess || major != 9) return error;
  if constexpr (kMayExchange<Args>)
    if (error = ProductKernel<MatmulExchangeArgs>::load(); error != cudaSuccess) return error;
  for (const DType in : {DType::bfloat16, DType::float16})
    for (const DType out : {in, DType::float32})
      for (const int block_n : {128, 256})
        for (const bool mn_b : {false, true}) {
          cudaFuncAttributes attributes;
          const auto kernel = overlapped_for<Args>(in, out, block_n, mn_b);
          error = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel));
          if (error != cudaSuccess) return error;
        }
  return cudaSuccess;
}

}  // namespace jax_ep
