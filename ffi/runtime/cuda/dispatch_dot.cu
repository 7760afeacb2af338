// dispatch_ragged_dot for every dtype that the core multiplies. Compiled for sm_90a alone.
#include "gemm/tensor_map.h"
#include "kernels/moe/overlap_dot.h"
#include "runtime/cuda/gemm_launch.h"
#include "runtime/gpu/kernel_launch.h"

namespace jax_ep {
namespace {

// By the width of tiles.
template <class In, int kBlockN>
constexpr gemm::Variant kKernel{std::tuple(kBlockN), &dispatch_dot_kernel<In, kBlockN>,
                                int{sizeof(gemm::Shared<kBlockN, DotLookout>)}};
template <class In>
constexpr std::array kKernels{kKernel<In, 128>, kKernel<In, 256>};

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
  const auto* const chosen = gemm::with_operand(
      args.dtype, [&](auto in) { return gemm::find(kKernels<decltype(in)>, config.product.block_n); });
  if (!chosen) return gemm::kNotCompiled;
  const auto error = gemm::describe_error(gemm::start(chosen->kernel, config.product.blocks, chosen->shared_bytes,
                                                      stream, maps.received, maps.rhs, maps.product, problem, work));
  return error ? std::optional(config.describe() + ": " + *error) : std::nullopt;
}

template <>
gpu::Error ProductKernel<DispatchDotArgs>::load() {
  return gemm::load_all(kKernels<__nv_bfloat16>, kKernels<__half>);
}

}  // namespace jax_ep
