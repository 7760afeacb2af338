// What all launches of matrix products have in common: which kernels there are, and how one starts.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>

#include "comm/dtype.h"
#include "gemm/layout.h"
#include "gemm/plan.h"
#include "runtime/gpu/parameters.h"

namespace jax_ep::gemm {

inline std::optional<std::string> describe_error(cudaError_t error) {
  if (error == cudaSuccess) return std::nullopt;
  static_cast<void>(cudaGetLastError());  // XLA must not stumble over it
  return cudaGetErrorString(error);
}

// The number of SMs of the current device.
inline cudaError_t current_sms(int* sms) {
  int device = 0;
  const cudaError_t error = cudaGetDevice(&device);
  return error == cudaSuccess ? cudaDeviceGetAttribute(sms, cudaDevAttrMultiProcessorCount, device) : error;
}

// Whether the current device is a Hopper, or why nobody can say.
inline cudaError_t is_hopper(bool* answer) {
  int device = 0, major = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  *answer = error == cudaSuccess && major == 9;
  return error;
}

// One of the kernels of a table, and what it serves there: the dtype of the result, the width of tiles, storage orders.
// What stands in no table is not compiled.
template <class Kernel, class... Key>
struct Variant {
  std::tuple<Key...> key;
  Kernel kernel;
  int shared_bytes;
};
template <class Kernel, class... Key>
Variant(std::tuple<Key...>, Kernel, int) -> Variant<Kernel, Key...>;

constexpr const char* kNotCompiled = "no kernel is compiled for this dtype of the result, order of b and tile width";

// Null where there is none.
template <class Kernel, class... Key, std::size_t kCount>
const Variant<Kernel, Key...>* find(const std::array<Variant<Kernel, Key...>, kCount>& table, Key... key) {
  for (const auto& variant : table)
    if (variant.key == std::tuple(key...)) return &variant;
  return nullptr;
}

// Calls run(in) with a value of a dtype that operands may have: nothing else chooses it.
template <class Run>
auto with_operand(DType dtype, Run run) {
  return dtype == DType::bfloat16 ? run(__nv_bfloat16{}) : run(__half{});
}

// The dtype of values in a kernel.
template <class T>
constexpr DType kDType = std::is_same_v<T, float>    ? DType::float32
                         : std::is_same_v<T, __half> ? DType::float16
                                                     : DType::bfloat16;

// Loads every kernel of some tables on the current device, if it is a Hopper.
template <class... Tables>
cudaError_t load_all(const Tables&... tables) {
  bool hopper = false;
  cudaError_t error = is_hopper(&hopper);
  if (!hopper) return error;
  const auto load = [&](const auto& variant) {
    cudaFuncAttributes attributes;
    if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(variant.kernel));
  };
  (std::for_each(std::begin(tables), std::end(tables), load), ...);
  return error;
}

template <class... Parameters, class... Arguments>
cudaError_t start(void (*kernel)(Parameters...), int blocks, int shared_bytes, cudaStream_t stream,
                  const Arguments&... arguments) {
  constexpr std::size_t kMapBytes = (std::is_same_v<Parameters, CUtensorMap> + ... + 0) * sizeof(CUtensorMap);
  static_assert(parameter_bytes<Parameters...>() - kMapBytes <= kMostParameterBytes, "no coop reads tensor maps");
  cudaLaunchConfig_t launch{};
  launch.gridDim = dim3(blocks);
  launch.blockDim = dim3(kThreads);
  launch.dynamicSmemBytes = shared_bytes;
  launch.stream = stream;
  if (const cudaError_t error = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                                     cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
      error != cudaSuccess)
    return error;
  return cudaLaunchKernelEx(&launch, kernel, arguments...);
}

// Starts a kernel whose clusters take tiles off a counter, among the arguments, which is cleared before.
template <class Kernel, class... Key, class... Arguments>
std::optional<std::string> start_counted(const Variant<Kernel, Key...>& chosen, int blocks, cudaStream_t stream,
                                         uint32_t* counter, const Arguments&... arguments) {
  cudaError_t error = cudaMemsetAsync(counter, 0, sizeof(uint32_t), stream);
  if (error == cudaSuccess) error = start(chosen.kernel, blocks, chosen.shared_bytes, stream, arguments...);
  return describe_error(error);
}

}  // namespace jax_ep::gemm
