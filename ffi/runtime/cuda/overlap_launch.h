// Defines OverlapKernel: picks the kernel for dtypes, tiles and storage order, and describes arrays to TMA. The kernels
// of each Args are compiled in one file (ffi/kernel_instances.cmake), for sm_90a alone.
#pragma once

#include <array>

#include "kernels/collective_matmul/overlap_exchange.h"
#include "kernels/collective_matmul/rank_matmul.h"
#include "runtime/cuda/gemm_launch.h"
#include "runtime/gpu/kernel_launch.h"

namespace jax_ep {

template <class In, class Out, int kBlockN, bool kMnB, class Args>
__global__ void __cluster_dims__(gemm::kCluster, 1, 1) __launch_bounds__(gemm::kThreads, 1)
    overlapped_kernel(const __grid_constant__ CUtensorMap lhs, const __grid_constant__ CUtensorMap rhs,
                      const __grid_constant__ CUtensorMap out_map, const __grid_constant__ OwnMap<Args> own, void* out,
                      const __grid_constant__ gemm::Problem problem, const __grid_constant__ OverlapWork<Args> work) {
  extern __shared__ __align__(1024) char memory[];
  run_overlapped<In, Out, kBlockN, kMnB>(memory, Operands<Args>{lhs, rhs, out_map, own, out, problem}, work);
}

template <class Args>
using OverlappedKernel = void (*)(CUtensorMap, CUtensorMap, CUtensorMap, OwnMap<Args>, void*, gemm::Problem,
                                  OverlapWork<Args>);
static_assert(parameter_bytes<gemm::Problem, OverlapWork<AllGatherMatmulArgs>>() <= kMaxParameterBytes &&
              parameter_bytes<gemm::Problem, OverlapWork<MatmulReduceArgs>>() <= kMaxParameterBytes);

template <class Args, class In, class Out, int kBlockN, bool kMnB>
constexpr gemm::Variant<OverlappedKernel<Args>> kOverlapped{
    {gemm::kElement<In>, gemm::kElement<Out>, false, kMnB, kBlockN},
    &overlapped_kernel<In, Out, kBlockN, kMnB, Args>,
    int{sizeof(gemm::Shared<kBlockN, AuxOf<Args>>)}};
template <class Args>
constexpr std::array kOverlappedKernels{
    kOverlapped<Args, gemm::Bf16, gemm::Bf16, 128, true>,  kOverlapped<Args, gemm::Bf16, gemm::Bf16, 256, true>,
    kOverlapped<Args, gemm::Bf16, float, 128, true>,       kOverlapped<Args, gemm::Bf16, float, 256, true>,
    kOverlapped<Args, gemm::Bf16, gemm::Bf16, 128, false>, kOverlapped<Args, gemm::Bf16, gemm::Bf16, 256, false>,
    kOverlapped<Args, gemm::F16, gemm::F16, 128, true>,    kOverlapped<Args, gemm::F16, gemm::F16, 256, true>,
    kOverlapped<Args, gemm::F16, float, 128, true>,        kOverlapped<Args, gemm::F16, float, 256, true>,
    kOverlapped<Args, gemm::F16, gemm::F16, 128, false>,   kOverlapped<Args, gemm::F16, gemm::F16, 256, false>};

// Only a gather needs a map of this rank's own rows.
inline std::optional<std::string> describe_own(const MatmulReduceArgs&, gemm::Nothing*) { return std::nullopt; }
inline std::optional<std::string> describe_own(const AllGatherMatmulArgs& args, CUtensorMap* own) {
  return gemm::describe_boxes({args.lhs, gemm::element_of(args.operand_dtype), args.k, args.m, 1}, gemm::kSlice, own);
}

// Whether two ranks may exchange their tiles, instead of summing rows while the product runs.
template <class Args>
constexpr bool kMayExchange = std::is_same_v<Args, MatmulReduceArgs>;

extern template struct OverlapKernel<MatmulExchangeArgs>;

template <class Args>
std::optional<std::string> OverlapKernel<Args>::start(const OverlapConfig& config, gpu::Stream stream, const Comm& comm,
                                                      const Args& args) {
  if constexpr (kMayExchange<Args>)
    if (config.communicating == 0)
      return OverlapKernel<MatmulExchangeArgs>::start(config, stream, comm, MatmulExchangeArgs{args});
  const RankMatmul matmul = rank_matmul(args, comm, config);
  if (args.operand_dtype == DType::float32) return "operands must be bfloat16 or float16";
  const gemm::Element in = gemm::element_of(args.operand_dtype), out = gemm::element_of(args.dtype);
  const gemm::Variants<OverlappedKernel<Args>> kernels = kOverlappedKernels<Args>;
  const auto* const variant = gemm::find(kernels, {in, out, false, !args.transpose_rhs, config.block_n});
  if (!variant) return gemm::kNotCompiled;
  CUtensorMap lhs, rhs, out_map;
  const int rhs_outer = args.transpose_rhs ? args.n : args.k, rhs_inner = args.transpose_rhs ? args.k : args.n;
  OwnMap<Args> own;
  const gemm::Matrices lhs_rows{matmul.lhs, in, args.k, matmul.problem.m, 1};
  const gemm::Matrices rhs_rows{args.rhs, in, rhs_inner, rhs_outer, 1};
  const gemm::Matrices out_rows{matmul.out, out, args.n, matmul.problem.m, 1};
  auto error = gemm::describe_boxes(lhs_rows, gemm::kSlice, &lhs);
  if (!error) error = gemm::describe_boxes(rhs_rows, gemm::kSlice, &rhs);
  if (!error) error = gemm::describe_boxes(out_rows, gemm::kOutRows, &out_map);
  if (!error) error = describe_own(args, &own);
  if (error) return error;
  const OverlapWork<Args> work{comm, args, config.communicating, matmul.first_communicating, config.block_n};
  return gpu::explain(gemm::start(*variant, config.ctas(), stream, lhs, rhs, out_map, own,
                                  static_cast<void*>(matmul.out), matmul.problem, work),
                      config);
}

template <class Args>
gpu::Error OverlapKernel<Args>::load() {
  if constexpr (kMayExchange<Args>)
    if (const gpu::Error error = OverlapKernel<MatmulExchangeArgs>::load(); error != cudaSuccess) return error;
  return gemm::load_all(gemm::Variants<OverlappedKernel<Args>>(kOverlappedKernels<Args>));
}

}  // namespace jax_ep
