// Products of float8 operands. Compiled for sm_90a alone, which has wgmma.
#include <climits>

#include "gemm/float8.h"
#include "gemm/gemm.h"
#include "gemm/tensor_map.h"

namespace jax_ep::gemm {
namespace {

constexpr int kBlockN = 192;  // so wide that its sums and those of a block fill the registers
using Memory = SharedFor<kBlockN, NoHooks>;

std::optional<std::string> check(const Float8Arguments& x) {
  if (x.m < 1 || x.groups < 1) return "there must be at least one row and one group";
  if (x.n < 1 || x.k < 1 || x.n % kFloat8Block || x.k % kFloat8Block) return "n and k must be multiples of 128";
  if (int64_t{x.m} * (x.k / kFloat8Block) > INT_MAX) return "there are too many rows";
  if (x.out != DType::bfloat16 && x.out != DType::float32) return "the result must be bfloat16 or float32";
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

template <class Out>
cudaError_t start(const Float8Arguments& x, const Config& config, const Problem& problem, const Maps& maps,
                  cudaStream_t stream) {
  cudaLaunchConfig_t launch{};
  launch.gridDim = dim3(config.blocks);
  launch.blockDim = dim3(kThreads);
  launch.dynamicSmemBytes = sizeof(Memory);
  launch.stream = stream;
  const auto kernel = float8_kernel<Out, kBlockN>;
  if (const cudaError_t error =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(sizeof(Memory)));
      error != cudaSuccess)
    return error;
  const Float8Scales scales{x.a_scales, x.b_scales};
  return cudaLaunchKernelEx(&launch, kernel, maps.a, maps.b, maps.out, static_cast<Out*>(x.out_data), problem, scales);
}

}  // namespace

std::optional<std::string> launch(const Float8Arguments& x, cudaStream_t stream) {
  if (const auto error = check(x)) return error;
  Maps maps;
  if (const auto error = describe(x, &maps)) return error;
  int device = 0, sms = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return cudaGetErrorString(error);
  HardwareModel model = hardware_model("sm_90");
  model.sms = sms;
  const Config config = plan_width({Grouping::m_grouped, x.m, x.n, x.k, x.groups}, model, kBlockN);
  const Problem problem{Grouping::m_grouped, x.m, x.n, x.k / 2, x.groups, x.group_sizes, config.band};
  error = x.out == DType::float32 ? start<float>(x, config, problem, maps, stream)
                                  : start<__nv_bfloat16>(x, config, problem, maps, stream);
  if (error == cudaSuccess) return std::nullopt;
  static_cast<void>(cudaGetLastError());  // XLA must not stumble over it
  return config.describe() + ": " + cudaGetErrorString(error);
}

cudaError_t load_float8() {
  int device = 0, major = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error != cudaSuccess || major != 9) return error;
  cudaFuncAttributes attributes;
  error = cudaFuncGetAttributes(&attributes, float8_kernel<float, kBlockN>);
  return error == cudaSuccess ? cudaFuncGetAttributes(&attributes, float8_kernel<__nv_bfloat16, kBlockN>) : error;
}

}  // namespace jax_ep::gemm
