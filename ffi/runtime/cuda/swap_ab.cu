// Products whose rows are in groups, by tiles that have no more rows than they need. Compiled for sm_90a alone, which
// has wgmma.
#include "gemm/gemm.h"
#include "gemm/swap_ab.h"
#include "gemm/tensor_map.h"
#include "runtime/cuda/gemm_launch.h"

namespace jax_ep::gemm {
namespace {

// By the dtype of the result; whether b is stored [k, n]. A gradient has the dtype of its operands.
template <class In, class Out, bool kMn>
constexpr Variant kKernel{std::tuple(kDType<Out>, kMn), &swapped_kernel<In, Out, kMn>, int{sizeof(SwapMemory)}};
template <class In>
constexpr std::array kKernels{kKernel<In, In, true>, kKernel<In, float, true>, kKernel<In, In, false>};

struct Maps {
  CUtensorMap rows, weights, out;
};

std::optional<std::string> describe(const Arguments& x, Maps* maps) {
  const Matrices weights =
      x.b_is_k_by_n ? Matrices{x.b, x.in, x.n, x.k, x.groups} : Matrices{x.b, x.in, x.k, x.n, x.groups};
  if (const auto error = describe_boxes({x.a, x.in, x.k, x.m, 1}, kSlice, &maps->rows)) return "a: " + *error;
  if (const auto error = describe_boxes(weights, kSlice, &maps->weights)) return "b: " + *error;
  if (const auto error = describe_boxes({x.out_data, x.out, x.n, x.m, 1}, kOutRows, &maps->out))
    return "out: " + *error;
  return std::nullopt;
}

}  // namespace

std::optional<std::string> launch_swapped(const Arguments& x, const Config& config, cudaStream_t stream) {
  if (x.grouping != Grouping::m_grouped) return "only rows in groups have such tiles";
  if (!x.counter) return "there must be a counter of tiles";
  const auto* const chosen =
      with_operand(x.in, [&](auto in) { return find(kKernels<decltype(in)>, x.out, x.b_is_k_by_n); });
  if (!chosen) return kNotCompiled;
  Maps maps;
  if (const auto error = describe(x, &maps)) return error;
  const Problem problem{x.grouping, x.m, x.n, x.k, x.groups, x.group_sizes, config.band};
  return start_counted(*chosen, config.blocks, stream, x.counter, maps.rows, maps.weights, maps.out, x.out_data,
                       x.counter, problem);
}

cudaError_t load_swapped() { return load_all(kKernels<__nv_bfloat16>, kKernels<__half>); }

}  // namespace jax_ep::gemm
