// What all launches of matrix products have in common.
#pragma once

#include <cuda_runtime_api.h>

#include <optional>
#include <string>

#include "comm/hardware_model.h"
#include "gemm/layout.h"
#include "gemm/plan.h"

namespace jax_ep::gemm {

inline std::optional<std::string> describe_error(cudaError_t error) {
  if (error == cudaSuccess) return std::nullopt;
  static_cast<void>(cudaGetLastError());  // XLA must not stumble over it
  return cudaGetErrorString(error);
}

// The model of the current device, for products on all of its SMs.
inline cudaError_t current_model(HardwareModel* model) {
  int device = 0;
  *model = hardware_model("sm_90");
  const cudaError_t error = cudaGetDevice(&device);
  return error == cudaSuccess ? cudaDeviceGetAttribute(&model->sms, cudaDevAttrMultiProcessorCount, device) : error;
}

// Whether the current device is a Hopper, or why nobody can say.
inline cudaError_t is_hopper(bool* answer) {
  int device = 0, major = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  *answer = major == 9;
  return error;
}

inline cudaError_t load_kernel(const void* kernel) {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, kernel);
}

template <class... Parameters, class... Arguments>
cudaError_t start(void (*kernel)(Parameters...), int blocks, int shared_bytes, cudaStream_t stream,
                  const Arguments&... arguments) {
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

}  // namespace jax_ep::gemm
