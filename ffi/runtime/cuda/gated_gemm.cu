// Gated units in one product. Compiled for sm_90a alone, which has wgmma.
#include "gemm/gated.h"
#include "gemm/gemm.h"
#include "gemm/tensor_map.h"
#include "runtime/cuda/gemm_launch.h"

namespace jax_ep::gemm {
namespace {

template <class T, Activation kActivation>
constexpr Variant kKernel{std::tuple(kActivation), &gated_kernel<T, kActivation>, int{sizeof(SwapMemory)}};
template <class T>
constexpr std::array kKernels{kKernel<T, Activation::silu>, kKernel<T, Activation::gelu>, kKernel<T, Activation::relu>};

struct Maps {
  CUtensorMap rows, gate, up;
};

std::optional<std::string> describe(const GatedArguments& x, Maps* maps) {
  if (const auto error = describe_boxes({x.rows, x.dtype, x.k, x.m, 1}, kSlice, &maps->rows)) return "rows: " + *error;
  if (const auto error = describe_boxes({x.gate, x.dtype, x.columns, x.k, x.groups}, kSlice, &maps->gate))
    return "gate: " + *error;
  if (const auto error = describe_boxes({x.up, x.dtype, x.columns, x.k, x.groups}, kSlice, &maps->up))
    return "up: " + *error;
  return std::nullopt;
}

template <class T>
std::optional<std::string> describe(const GatedArguments& x, Kept<T>* kept) {
  if (!x.keeps_products) return std::nullopt;
  void* const of_up = x.columns == x.n ? x.of_up : x.of_gate;
  kept->gate = static_cast<T*>(x.of_gate);
  kept->up = static_cast<T*>(of_up);
  kept->columns = x.columns;
  kept->up_column = x.up_column;
  if (const auto error = describe_boxes({x.of_gate, x.dtype, x.columns, x.m, 1}, kOutRows, &kept->gate_map))
    return "of_gate: " + *error;
  if (const auto error = describe_boxes({of_up, x.dtype, x.columns, x.m, 1}, kOutRows, &kept->up_map))
    return "of_up: " + *error;
  return std::nullopt;
}

}  // namespace

std::optional<std::string> launch(const GatedArguments& x, cudaStream_t stream) {
  if (x.m < 1 || x.n < 1 || x.k < 1 || x.groups < 1) return "m, n, k and groups must be at least 1";
  if (x.columns < x.n || x.up_column < 0 || x.up_column > x.columns - x.n) return "gate and up have too few columns";
  if (x.dtype == DType::float32) return "the operands must be bfloat16 or float16";
  Maps maps;
  if (const auto error = describe(x, &maps)) return error;
  int sms = 0;
  if (const auto error = describe_error(current_sms(&sms))) return error;
  const Config config = plan_swapped({Grouping::m_grouped, x.m, x.n, x.k, x.groups}, sms, GateAndUp::kColumns);
  const Problem problem{Grouping::m_grouped, x.m, x.n, x.k, x.groups, x.group_sizes, config.band};
  return with_operand(x.dtype, [&](auto in) -> std::optional<std::string> {
    using T = decltype(in);
    const auto* const chosen = find(kKernels<T>, x.activation);
    if (!chosen) return "no such activation";
    Kept<T> kept{};
    if (const auto error = describe(x, &kept)) return error;
    return start_counted(*chosen, config.blocks, stream, x.counter, maps.rows, maps.gate, maps.up, x.up_column,
                         x.out_data, kept, x.counter, problem);
  });
}

cudaError_t load_gated() { return load_all(kKernels<__nv_bfloat16>, kKernels<__half>); }

}  // namespace jax_ep::gemm
