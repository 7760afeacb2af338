// What CUDA's virtual memory does not share with HIP's: runtime/gpu/vmm.h has the rest. Functions of the driver are
// found by name, as a machine without GPUs has no driver to link.
#pragma once

#include <cuda.h>

#include "platform/runtime.h"

namespace jax_ep::gpu {

// A function of the driver, whose errors have the numbers of the runtime's.
template <class Function>
struct DriverFunction {
  Function* function = nullptr;  // null where there is no driver

  explicit DriverFunction(const char* name) {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found{};
    const Error error = cudaGetDriverEntryPointByVersion(name, &entry, 11020, cudaEnableDefault, &found);
    if (error == kSuccess && found == cudaDriverEntryPointSuccess) function = reinterpret_cast<Function*>(entry);
  }
  template <class... Arguments>
  Error operator()(Arguments... arguments) const {
    return function ? static_cast<Error>(function(arguments...)) : cudaErrorNotSupported;
  }
};
#define JAX_EP_DRIVER(name)                                               \
  [] {                                                                    \
    static const DriverFunction<decltype(cu##name)> function("cu" #name); \
    return function;                                                      \
  }()

using Allocation = CUmemGenericAllocationHandle;
using DriverAddress = CUdeviceptr;
constexpr auto kRecommended = CU_MEM_ALLOC_GRANULARITY_RECOMMENDED;
constexpr auto kFileDescriptor = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

inline CUmemAllocationProp shareable_memory(int device) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.requestedHandleTypes = kFileDescriptor;
  properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, device};
  return properties;
}
inline CUmemAccessDesc access_from(int device) {
  return {{CU_MEM_LOCATION_TYPE_DEVICE, device}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
}

}  // namespace jax_ep::gpu

#include "runtime/gpu/vmm.h"
