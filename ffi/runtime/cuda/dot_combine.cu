// ragged_dot_combine for every dtype that the core multiplies: the product, and behind it the combine, which begins
// while the product runs. Compiled for Hopper alone.
#include "comm/target/ptx/grid.h"
#include "gemm/gemm.h"
#include "kernels/moe/dot_combine.h"
#include "runtime/cuda/gemm_launch.h"
#include "runtime/gpu/kernel_launch.h"

namespace jax_ep {
namespace {

constexpr int kThreads = 256;

template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    combine_kernel(const __grid_constant__ Comm comm, const __grid_constant__ DotCombineArgs args, int senders,
                   int warp_bytes) {
  combine_product<T>(comm, args, this_coop(senders, warp_bytes));
  if (threadIdx.x == 0) ptx::wait_for_kernel_before();
}

template <class T>
constexpr std::array kKernels{gemm::Variant{std::tuple(), &combine_kernel<T>, 0}};

std::optional<std::string> start_product(const DotCombineConfig& config, gpu::Stream stream,
                                         const DotCombineArgs& args) {
  if (args.capacity == 0) return std::nullopt;  // there are no tiles
  gemm::Beside beside;
  beside.stored = args.words;
  beside.leaving = config.leaving;
  beside.tail = config.tail;
  auto* const counter = reinterpret_cast<uint32_t*>(args.words + DotCombineWords(args.capacity).tiles());
  const int m = args.capacity, n = args.hidden, k = args.contraction, groups = args.local_experts;
  const gemm::Arguments product{gemm::Grouping::m_grouped,
                                m,
                                n,
                                k,
                                groups,
                                args.dtype,
                                args.dtype,
                                /*a_is_k_by_m=*/false,
                                /*b_is_k_by_n=*/true,
                                args.lhs,
                                args.rhs,
                                args.product,
                                args.group_sizes,
                                counter,
                                beside};
  return launch_swapped(product, config.product, stream);
}

cudaError_t start_combine(const LaunchConfig& config, gpu::Stream stream, const Comm& comm,
                          const DotCombineArgs& args) {
  const int shared_bytes = config.threads / Coop::lanes * config.warp_bytes;
  const auto launch = gemm::launch_of(config.blocks, config.threads, shared_bytes, stream);
  const auto follows = args.capacity > 0 ? gemm::Follows::begun : gemm::Follows::ended;  // a product, or nothing
  const auto start = [&](auto kernel) {
    return gemm::start(kernel, launch, follows, comm, args, config.senders_per_cta, config.warp_bytes);
  };
  return args.dtype == DType::bfloat16 ? start(&combine_kernel<BFloat16>) : start(&combine_kernel<Float16>);
}

}  // namespace

template <>
std::optional<std::string> ProductKernel<DotCombineArgs>::start(const DotCombineConfig& config, gpu::Stream stream,
                                                                const Comm& comm, const DotCombineArgs& args) {
  if (args.dtype == DType::float32) return "lhs must be bfloat16 or float16";
  const std::size_t words = DotCombineWords(args.capacity).count() * sizeof(uint64_t);
  auto error = gemm::describe_error(cudaMemsetAsync(args.words, 0, words, stream));
  if (!error) error = start_product(config, stream, args);
  if (!error) error = gemm::describe_error(start_combine(config.combine, stream, comm, args));
  return error ? std::optional(config.describe() + ": " + *error) : std::nullopt;
}

template <>
gpu::Error ProductKernel<DotCombineArgs>::load() {
  return gemm::load_all(kKernels<BFloat16>, kKernels<Float16>);
}

}  // namespace jax_ep
