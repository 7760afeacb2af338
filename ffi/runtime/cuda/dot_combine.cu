// ragged_dot_combine for every dtype that the core multiplies. Compiled for sm_90a alone.
#include "gemm/tensor_map.h"
#include "kernels/moe/overlap_dot_combine.h"
#include "runtime/cuda/gemm_launch.h"
#include "runtime/gpu/kernel_launch.h"

namespace jax_ep {
namespace {

// One width of tiles: with it both CTAs of a cluster may take a tile, too.
template <class In>
constexpr std::array kKernels{gemm::Variant{std::tuple(kDotCombineColumns), &dot_combine_kernel<In>,
                                            int{sizeof(gemm::Shared<kDotCombineColumns>)}}};

struct Maps {
  CUtensorMap lhs, rhs, product;
};

std::optional<std::string> describe(const DotCombineArgs& x, Maps* maps) {
  if (x.capacity == 0) return std::nullopt;  // there are no tiles, and TMA describes nothing empty
  if (const auto error = gemm::describe_boxes({x.lhs, x.dtype, x.contraction, x.capacity, 1}, gemm::kSlice, &maps->lhs))
    return "lhs: " + *error;
  if (const auto error =
          gemm::describe_boxes({x.rhs, x.dtype, x.hidden, x.contraction, x.local_experts}, gemm::kSlice, &maps->rhs))
    return "rhs: " + *error;
  if (const auto error =
          gemm::describe_boxes({x.product, x.dtype, x.hidden, x.capacity, 1}, gemm::kOutRows, &maps->product))
    return "product: " + *error;
  return std::nullopt;
}

}  // namespace

template <>
std::optional<std::string> ProductKernel<DotCombineArgs>::start(const DotCombineConfig& config, gpu::Stream stream,
                                                                const Comm& comm, const DotCombineArgs& args) {
  if (args.dtype == DType::float32) return "lhs must be bfloat16 or float16";
  Maps maps{};
  if (const auto error = describe(args, &maps)) return error;
  gemm::Problem problem = product_of(args, comm.size, config.product.band);
  problem.split_k = config.product.split_k;
  const DotCombineWork work{comm, args, config.leaving, config.body};
  const auto* const chosen = gemm::with_operand(
      args.dtype, [&](auto in) { return gemm::find(kKernels<decltype(in)>, config.product.block_n); });
  if (!chosen) return gemm::kNotCompiled;
  const auto error = gemm::describe_error(gemm::start(chosen->kernel, config.product.blocks, chosen->shared_bytes,
                                                      stream, maps.lhs, maps.rhs, maps.product, problem, work));
  return error ? std::optional(config.describe() + ": " + *error) : std::nullopt;
}

template <>
gpu::Error ProductKernel<DotCombineArgs>::load() {
  return gemm::load_all(kKernels<__nv_bfloat16>, kKernels<__half>);
}

}  // namespace jax_ep
