// Products whose rows are in groups, by tiles that have no more rows than they need. Compiled for sm_90a alone, which
// has wgmma.
#include "gemm/gemm.h"
#include "gemm/swap_ab.h"
#include "gemm/tensor_map.h"
#include "runtime/cuda/gemm_launch.h"

namespace jax_ep::gemm {
namespace {

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

template <class In, class Out, bool kMn>
cudaError_t start_for(const Arguments& x, const Config& config, const Maps& maps, cudaStream_t stream) {
  const Problem problem{x.grouping, x.m, x.n, x.k, x.groups, x.group_sizes, config.band};
  return start(swapped_kernel<In, Out, kMn>, config.blocks, sizeof(SwapMemory), stream, maps.rows, maps.weights,
               maps.out, static_cast<Out*>(x.out_data), x.counter, problem);
}

template <class In, class Out>
cudaError_t start_for(const Arguments& x, const Config& config, const Maps& maps, cudaStream_t stream) {
  return x.b_is_k_by_n ? start_for<In, Out, true>(x, config, maps, stream)
                       : start_for<In, Out, false>(x, config, maps, stream);
}

template <class In>
cudaError_t start_for(const Arguments& x, const Config& config, const Maps& maps, cudaStream_t stream) {
  return x.out == DType::float32 ? start_for<In, float>(x, config, maps, stream)
                                 : start_for<In, In>(x, config, maps, stream);
}

template <class In, class Out>
cudaError_t load_for() {
  const cudaError_t error = load_kernel(reinterpret_cast<const void*>(swapped_kernel<In, Out, false>));
  return error == cudaSuccess ? load_kernel(reinterpret_cast<const void*>(swapped_kernel<In, Out, true>)) : error;
}

}  // namespace

std::optional<std::string> launch_swapped(const Arguments& x, const Config& config, cudaStream_t stream) {
  if (x.grouping != Grouping::m_grouped) return "only rows in groups have such tiles";
  if (!x.counter) return "there must be a counter of tiles";
  Maps maps;
  if (const auto error = describe(x, &maps)) return error;
  cudaError_t error = cudaMemsetAsync(x.counter, 0, sizeof(uint32_t), stream);
  if (error == cudaSuccess)
    error = x.in == DType::bfloat16 ? start_for<__nv_bfloat16>(x, config, maps, stream)
                                    : start_for<__half>(x, config, maps, stream);
  return describe_error(error);
}

cudaError_t load_swapped() {
  for (const auto load : {load_for<__nv_bfloat16, __nv_bfloat16>, load_for<__nv_bfloat16, float>,
                          load_for<__half, __half>, load_for<__half, float>})
    if (const cudaError_t error = load(); error != cudaSuccess) return error;
  return cudaSuccess;
}

}  // namespace jax_ep::gemm
