// Products of float8 operands. Compiled for sm_90a alone, which has wgmma.
#include <climits>

#include "gemm/float8.h"
#include "gemm/gemm.h"
#include "gemm/tensor_map.h"
#include "runtime/cuda/gemm_launch.h"

namespace jax_ep::gemm {
namespace {

constexpr int kBlockN = 192;  // so wide that its sums and those of a block fill the registers

template <class Out>
constexpr Variant kKernel{std::tuple(kDType<Out>), &float8_kernel<Out, kBlockN>,
                          int{sizeof(SharedFor<kBlockN, NoHooks>)}};
constexpr std::array kKernels{kKernel<float>, kKernel<__nv_bfloat16>};

std::optional<std::string> check(const Float8Arguments& x) {
  if (x.m < 1 || x.groups < 1) return "there must be at least one row and one group";
  if (x.n < 1 || x.k < 1 || x.n % kFloat8Block || x.k % kFloat8Block) return "n and k must be multiples of 128";
  if (int64_t{x.m} * (x.k / kFloat8Block) > INT_MAX) return "there are too many rows";
  return std::nullopt;
}

struct Maps {
  CUtensorMap a, b, out;
};

// Two values of float8 are one of 16 bits.
std::optional<std::string> describe(const Float8Arguments& x, Maps* maps) {
  const int pairs = x.k / 2;
  if (const auto error = describe_boxes({x.a, DType::bfloat16, pairs, x.m, 1}, kSlice, &maps->a)) return "a: " + *error;
  if (const auto error = describe_boxes({x.b, DType::bfloat16, pairs, x.n, x.groups}, kSlice, &maps->b))
    return "b: " + *error;
  if (const auto error = describe_boxes({x.out_data, x.out, x.n, x.m, 1}, kOutRows, &maps->out))
    return "out: " + *error;
  return std::nullopt;
}

}  // namespace

std::optional<std::string> launch(const Float8Arguments& x, cudaStream_t stream) {
  if (const auto error = check(x)) return error;
  const auto* const chosen = find(kKernels, x.out);
  if (!chosen) return "the result must be bfloat16 or float32";
  Maps maps;
  if (const auto error = describe(x, &maps)) return error;
  int sms = 0;
  if (const auto error = describe_error(current_sms(&sms))) return error;
  const Config config = plan_width({Grouping::m_grouped, x.m, x.n, x.k, x.groups}, sms, kBlockN);
  const Problem problem{Grouping::m_grouped, x.m, x.n, x.k / 2, x.groups, x.group_sizes, config.band};
  const auto error = describe_error(start(chosen->kernel, config.blocks, chosen->shared_bytes, stream, maps.a, maps.b,
                                          maps.out, x.out_data, problem, Float8Scales{x.a_scales, x.b_scales}));
  return error ? std::optional(config.describe() + ": " + *error) : std::nullopt;
}

cudaError_t load_float8() { return load_all(kKernels); }

}  // namespace jax_ep::gemm
