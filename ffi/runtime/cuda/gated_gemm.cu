// Gated units in one product. Compiled for sm_90a alone, which has wgmma.
#include "gemm/gated.h"
#include "gemm/gemm.h"
#include "gemm/tensor_map.h"
#include "runtime/cuda/gemm_launch.h"

namespace jax_ep::gemm {
namespace {

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
using Kernel = void (*)(CUtensorMap, CUtensorMap, CUtensorMap, int, T*, uint32_t*, Problem);

template <class T>
Kernel<T> choose(Activation activation) {
  switch (activation) {
    case Activation::silu:
      return gated_kernel<T, Activation::silu>;
    case Activation::gelu:
      return gated_kernel<T, Activation::gelu>;
    case Activation::relu:
      return gated_kernel<T, Activation::relu>;
  }
  return nullptr;
}

template <class T>
cudaError_t start_for(const GatedArguments& x, const Config& config, const Maps& maps, cudaStream_t stream) {
  const Problem problem{Grouping::m_grouped, x.m, x.n, x.k, x.groups, x.group_sizes, config.band};
  return start(choose<T>(x.activation), config.blocks, sizeof(SwapMemory), stream, maps.rows, maps.gate, maps.up,
               x.up_column, static_cast<T*>(x.out_data), x.counter, problem);
}

}  // namespace

std::optional<std::string> launch(const GatedArguments& x, cudaStream_t stream) {
  if (x.m < 1 || x.n < 1 || x.k < 1 || x.groups < 1) return "m, n, k and groups must be at least 1";
  if (x.columns < x.n || x.up_column < 0 || x.up_column > x.columns - x.n) return "gate and up have too few columns";
  if (x.dtype == DType::float32) return "the operands must be bfloat16 or float16";
  Maps maps;
  if (const auto error = describe(x, &maps)) return error;
  HardwareModel model;
  if (const auto error = describe_error(current_model(&model))) return error;
  const Config config = plan_swapped({Grouping::m_grouped, x.m, x.n, x.k, x.groups}, model, GateAndUp::kColumns);
  cudaError_t error = cudaMemsetAsync(x.counter, 0, sizeof(uint32_t), stream);
  if (error == cudaSuccess)
    error = x.dtype == DType::bfloat16 ? start_for<__nv_bfloat16>(x, config, maps, stream)
                                       : start_for<__half>(x, config, maps, stream);
  return describe_error(error);
}

cudaError_t load_gated() {
  bool hopper = false;
  if (const cudaError_t error = is_hopper(&hopper); error != cudaSuccess || !hopper) return error;
  for (const Activation activation : {Activation::silu, Activation::gelu, Activation::relu})
    for (const void* kernel : {reinterpret_cast<const void*>(choose<__half>(activation)),
                               reinterpret_cast<const void*>(choose<__nv_bfloat16>(activation))})
      if (const cudaError_t error = load_kernel(kernel); error != cudaSuccess) return error;
  return cudaSuccess;
}

}  // namespace jax_ep::gemm
