// The sum of two grouped products. Compiled for sm_90a alone, which has wgmma.
#include "gemm/gemm.h"
#include "gemm/summed.h"
#include "gemm/tensor_map.h"
#include "runtime/cuda/gemm_launch.h"

namespace jax_ep::gemm {
namespace {

template <class T>
constexpr std::array kKernels{Variant{std::tuple(), &summed_kernel<T>, int{sizeof(SwapMemory)}}};

struct Maps {
  CUtensorMap first_rows, first, second_rows, second, out;
};

std::optional<std::string> describe(const SummedArguments& x, Maps* maps) {
  const auto rows = [&](const void* data) { return Matrices{data, x.dtype, x.k, x.m, 1}; };
  const auto weights = [&](const void* data) { return Matrices{data, x.dtype, x.k, x.n, x.groups}; };
  if (const auto error = describe_boxes(rows(x.first_rows), kSlice, &maps->first_rows)) return "first_rows: " + *error;
  if (const auto error = describe_boxes(weights(x.first), kSlice, &maps->first)) return "first: " + *error;
  if (const auto error = describe_boxes(rows(x.second_rows), kSlice, &maps->second_rows))
    return "second_rows: " + *error;
  if (const auto error = describe_boxes(weights(x.second), kSlice, &maps->second)) return "second: " + *error;
  if (const auto error = describe_boxes({x.out_data, x.dtype, x.n, x.m, 1}, kOutRows, &maps->out))
    return "out: " + *error;
  return std::nullopt;
}

}  // namespace

std::optional<std::string> launch(const SummedArguments& x, cudaStream_t stream) {
  Maps maps;
  if (const auto error = describe(x, &maps)) return error;
  int sms = 0;
  if (const auto error = describe_error(current_sms(&sms))) return error;
  const Config config = plan_swapped({Grouping::m_grouped, x.m, x.n, x.k, x.groups}, sms, TwoProducts::kColumns);
  const Problem problem{Grouping::m_grouped, x.m, x.n, x.k, x.groups, x.group_sizes, config.band};
  const auto* const chosen = with_operand(x.dtype, [&](auto in) { return find(kKernels<decltype(in)>); });
  return start_counted(*chosen, config.blocks, stream, x.counter, maps.first_rows, maps.first, maps.second_rows,
                       maps.second, maps.out, x.out_data, x.counter, problem);
}

cudaError_t load_summed() { return load_all(kKernels<__nv_bfloat16>, kKernels<__half>); }

}  // namespace jax_ep::gemm
