// The products of ffi/gemm for the dtypes and storage orders that Python calls. Compiled for sm_90a alone, which has
// wgmma.
#include "gemm/gemm.h"
#include "gemm/kernel.h"
#include "gemm/tensor_map.h"
#include "runtime/cuda/gemm_launch.h"

namespace jax_ep::gemm {
namespace {

// By the dtype of the result and the width of tiles; whether a is stored [k, m], and b [k, n].
template <class In, class Out, int kBlockN, bool kMnA, bool kMnB>
constexpr Variant kKernel{std::tuple(kDType<Out>, kBlockN, kMnA, kMnB),
                          &gemm_kernel<In, Out, kBlockN, kMnA, kMnB, NoHooks>, int{sizeof(Shared<kBlockN>)}};

// A gradient has the dtype of its operands: [m, k] times b transposed, or over groups of the contraction.
template <class In>
constexpr std::array kKernels{
    kKernel<In, In, 128, false, true>,    kKernel<In, In, 256, false, true>,  kKernel<In, float, 128, false, true>,
    kKernel<In, float, 256, false, true>, kKernel<In, In, 128, false, false>, kKernel<In, In, 256, false, false>,
    kKernel<In, In, 128, true, true>,     kKernel<In, In, 192, true, true>,   kKernel<In, In, 256, true, true>};

std::optional<std::string> check(const Arguments& x) {
  if (x.m < 1 || x.n < 1 || x.k < 1 || x.groups < 1) return "m, n, k and groups must be at least 1";
  if (x.in == DType::float32) return "the operands must be bfloat16 or float16";
  if (x.grouping == Grouping::k_grouped && (!x.a_is_k_by_m || !x.b_is_k_by_n))
    return "groups of the contraction need both operands stored with the contraction as rows";
  if (x.grouping != Grouping::k_grouped && x.a_is_k_by_m) return "a must be stored [m, k]";
  return std::nullopt;
}

struct Maps {
  CUtensorMap a, b, out;
};

std::optional<std::string> describe(const Arguments& x, Maps* maps) {
  const auto matrices = [](const void* data, DType dtype, int rows, int columns, int count) {
    return Matrices{data, dtype, columns, rows, count};
  };
  const int b_count = x.grouping == Grouping::m_grouped ? x.groups : 1;
  const int out_count = x.grouping == Grouping::k_grouped ? x.groups : 1;
  const Matrices a = x.a_is_k_by_m ? matrices(x.a, x.in, x.k, x.m, 1) : matrices(x.a, x.in, x.m, x.k, 1);
  const Matrices b = x.b_is_k_by_n ? matrices(x.b, x.in, x.k, x.n, b_count) : matrices(x.b, x.in, x.n, x.k, b_count);
  if (const auto error = describe_boxes(a, kSlice, &maps->a)) return "a: " + *error;
  if (const auto error = describe_boxes(b, kSlice, &maps->b)) return "b: " + *error;
  if (const auto error = describe_boxes(matrices(x.out_data, x.out, x.m, x.n, out_count), kOutRows, &maps->out))
    return "out: " + *error;
  return std::nullopt;
}

}  // namespace

std::optional<std::string> launch(const Arguments& x, const Config& config, cudaStream_t stream) {
  if (const auto error = check(x)) return error;
  if (config.swap_ab) return launch_swapped(x, config, stream);
  const auto* const chosen = with_operand(
      x.in, [&](auto in) { return find(kKernels<decltype(in)>, x.out, config.block_n, x.a_is_k_by_m, x.b_is_k_by_n); });
  if (!chosen) return kNotCompiled;
  Maps maps;
  if (const auto error = describe(x, &maps)) return error;
  Problem problem{x.grouping, x.m, x.n, x.k, x.groups, x.group_sizes, config.band};
  problem.split_k = config.split_k;
  const auto error = describe_error(start(chosen->kernel, config.blocks, chosen->shared_bytes, stream, maps.a, maps.b,
                                          maps.out, x.out_data, problem, NoHooks{}));
  return error ? std::optional(config.describe() + ": " + *error) : std::nullopt;
}

std::optional<std::string> launch(const Arguments& x, cudaStream_t stream) {
  int sms = 0;
  if (const auto error = describe_error(current_sms(&sms))) return error;
  return launch(x, plan({x.grouping, x.m, x.n, x.k, x.groups}, sms), stream);
}

cudaError_t load() {
  const cudaError_t error = load_all(kKernels<__nv_bfloat16>, kKernels<__half>);
  return error == cudaSuccess ? load_swapped() : error;
}

}  // namespace jax_ep::gemm
