// Gated units of float8 operands. Compiled for sm_90a alone, which has wgmma.
#include "gemm/gated_float8.h"
#include "gemm/gemm.h"
#include "gemm/tensor_map.h"
#include "runtime/cuda/gemm_launch.h"

namespace jax_ep::gemm {
namespace {

template <Activation kActivation>
constexpr Variant kKernel{std::tuple(kActivation), &gated_float8_kernel<kActivation>, int{sizeof(GatedFloat8Memory)}};
constexpr std::array kKernels{kKernel<Activation::silu>, kKernel<Activation::gelu>, kKernel<Activation::relu>};

struct Maps {
  CUtensorMap rows, gate, up;
};

// Two values of float8 are one of 16 bits.
std::optional<std::string> describe(const GatedFloat8Arguments& x, Maps* maps) {
  const int pairs = x.k / 2;
  const auto weights = [&](const void* data) { return Matrices{data, DType::bfloat16, pairs, x.columns, x.groups}; };
  if (const auto error = describe_boxes({x.rows, DType::bfloat16, pairs, x.m, 1}, kSlice, &maps->rows))
    return "rows: " + *error;
  if (const auto error = describe_boxes(weights(x.gate), kSlice, &maps->gate)) return "gate: " + *error;
  if (const auto error = describe_boxes(weights(x.up), kSlice, &maps->up)) return "up: " + *error;
  return std::nullopt;
}

}  // namespace

std::optional<std::string> launch(const GatedFloat8Arguments& x, cudaStream_t stream) {
  const auto* const chosen = find(kKernels, x.activation);
  if (!chosen) return "no such activation";
  Maps maps;
  if (const auto error = describe(x, &maps)) return error;
  int sms = 0;
  if (const auto error = describe_error(current_sms(&sms))) return error;
  const Config config = plan_width({Grouping::m_grouped, x.m, x.n, x.k, x.groups}, sms, kFloat8Block);
  const Problem problem{Grouping::m_grouped, x.m, x.n, x.k / 2, x.groups, x.group_sizes, config.band};
  const GatedFloat8Result out{static_cast<char*>(x.out_data), x.out_scales};
  const GatedFloat8Scales scales{x.rows_scales, x.gate_scales, x.up_scales, x.columns, x.up_column};
  return describe_error(start(chosen->kernel, config.blocks, chosen->shared_bytes, stream, maps.rows, maps.gate,
                              maps.up, out, problem, scales));
}

cudaError_t load_gated_float8() { return load_all(kKernels); }

}  // namespace jax_ep::gemm
