// What the CUDA runtime does not share with HIP's: runtime/gpu/runtime.h has the rest.
#pragma once

#include <cuda_runtime_api.h>

#define JAX_EP_RUNTIME(name) cuda##name

#include "runtime/gpu/runtime.h"

namespace jax_ep::gpu {

constexpr int kWarpLanes = 32;  // threads of a coop

inline Error allocate(void** memory, std::size_t bytes) { return cudaMalloc(memory, bytes); }
inline Error allocate_host(void** memory, std::size_t bytes) {
  return cudaHostAlloc(memory, bytes, cudaHostAllocPortable | cudaHostAllocMapped);
}
inline Error sm_count(int* count, int device) {
  return cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device);
}
inline Error shared_memory(int* bytes, int device) {
  return cudaDeviceGetAttribute(bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
}

}  // namespace jax_ep::gpu
