// What the HIP runtime does not share with CUDA's: runtime/gpu/runtime.h has the rest.
#pragma once

#include <hip/hip_runtime_api.h>

#define JAX_EP_RUNTIME(name) hip##name

#include "runtime/gpu/runtime.h"

namespace jax_ep::gpu {

constexpr int kWarpLanes = 64;  // threads of a coop

// Peers' flags must be seen while a kernel runs: a GPU may keep other memory of its own in caches that they do not
// reach.
#ifdef hipDeviceMallocUncached  // since ROCm 6
constexpr unsigned kSharedWithPeers = hipDeviceMallocUncached;
#else
constexpr unsigned kSharedWithPeers = hipDeviceMallocFinegrained;
#endif

inline Error allocate(void** memory, std::size_t bytes) {
  return hipExtMallocWithFlags(memory, bytes, kSharedWithPeers);
}
inline Error allocate_host(void** memory, std::size_t bytes) {
  return hipHostMalloc(memory, bytes, hipHostMallocPortable | hipHostMallocMapped);
}
inline Error sm_count(int* count, int device) {
  return hipDeviceGetAttribute(count, hipDeviceAttributeMultiprocessorCount, device);
}
inline Error shared_memory(int* bytes, int device) {
  return hipDeviceGetAttribute(bytes, hipDeviceAttributeMaxSharedMemoryPerBlock, device);
}

}  // namespace jax_ep::gpu
