// The products of ffi/gemm for every dtype and storage order. Compiled for sm_90a alone, which has wgmma.
#include "gemm/gemm.h"
#include "gemm/kernel.h"
#include "gemm/tensor_map.h"
#include "runtime/cuda/gemm_launch.h"

namespace jax_ep::gemm {
namespace {

using Kernel = void (*)(CUtensorMap, CUtensorMap, CUtensorMap, void*, Problem, NoHooks);

struct Choice {
  Kernel kernel;
  int shared_bytes;
};

template <class In, class Out, int kBlockN>
Choice choose_order(bool mn_a, bool mn_b) {
  constexpr int kBytes = sizeof(Shared<kBlockN>);
  if (mn_a && mn_b) return {gemm_kernel<In, Out, kBlockN, true, true, NoHooks>, kBytes};
  if (mn_a) return {gemm_kernel<In, Out, kBlockN, true, false, NoHooks>, kBytes};
  if (mn_b) return {gemm_kernel<In, Out, kBlockN, false, true, NoHooks>, kBytes};
  return {gemm_kernel<In, Out, kBlockN, false, false, NoHooks>, kBytes};
}

template <class In, class Out>
Choice choose_width(int block_n, bool mn_a, bool mn_b) {
  if (block_n == 128) return choose_order<In, Out, 128>(mn_a, mn_b);
  if (block_n == 192) return {gemm_kernel<In, Out, 192, true, true, NoHooks>, sizeof(Shared<192>)};
  return choose_order<In, Out, 256>(mn_a, mn_b);
}

Choice choose(DType in, DType out, int block_n, bool mn_a, bool mn_b) {
  if (in == DType::bfloat16)
    return out == DType::float32 ? choose_width<__nv_bfloat16, float>(block_n, mn_a, mn_b)
                                 : choose_width<__nv_bfloat16, __nv_bfloat16>(block_n, mn_a, mn_b);
  return out == DType::float32 ? choose_width<__half, float>(block_n, mn_a, mn_b)
                               : choose_width<__half, __half>(block_n, mn_a, mn_b);
}

std::optional<std::string> check(const Arguments& x, const Config& config) {
  if (x.m < 1 || x.n < 1 || x.k < 1 || x.groups < 1) return "m, n, k and groups must be at least 1";
  if (x.in == DType::float32) return "the operands must be bfloat16 or float16";
  if (x.out != x.in && x.out != DType::float32) return "the result must have the dtype of the operands or be float32";
  if (x.grouping == Grouping::k_grouped && (!x.a_is_k_by_m || !x.b_is_k_by_n))
    return "groups of the contraction need both operands stored with the contraction as rows";
  if (x.grouping == Grouping::m_grouped && x.a_is_k_by_m) return "rows in groups are stored [m, k]";
  if (config.block_n == 192 && x.grouping != Grouping::k_grouped)
    return "tiles of 192 columns are for groups of the contraction";
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
  if (const auto error = check(x, config)) return error;
  if (config.swap_ab) return launch_swapped(x, config, stream);
  Maps maps;
  if (const auto error = describe(x, &maps)) return error;
  Problem problem{x.grouping, x.m, x.n, x.k, x.groups, x.group_sizes, config.band};
  problem.split_k = config.split_k;
  const Choice choice = choose(x.in, x.out, config.block_n, x.a_is_k_by_m, x.b_is_k_by_n);
  const auto error = describe_error(start(choice.kernel, config.blocks, choice.shared_bytes, stream, maps.a, maps.b,
                                          maps.out, x.out_data, problem, NoHooks{}));
  return error ? std::optional(config.describe() + ": " + *error) : std::nullopt;
}

std::optional<std::string> launch(const Arguments& x, cudaStream_t stream) {
  HardwareModel model;
  if (const auto error = describe_error(current_model(&model))) return error;
  return launch(x, plan({x.grouping, x.m, x.n, x.k, x.groups}, model), stream);
}

cudaError_t load() {
  bool hopper = false;
  if (const cudaError_t error = is_hopper(&hopper); error != cudaSuccess || !hopper) return error;
  for (const DType in : {DType::bfloat16, DType::float16})
    for (const DType out : {in, DType::float32})
      for (const int block_n : {128, 192, 256})
        for (const int order : {0, 1, 2, 3}) {
          const Choice choice = choose(in, out, block_n, order & 1, order & 2);
          if (const cudaError_t error = load_kernel(reinterpret_cast<const void*>(choice.kernel)); error != cudaSuccess)
            return error;
        }
  return load_swapped();
}

}  // namespace jax_ep::gemm
