// What HIP's virtual memory does not share with CUDA's: runtime/gpu/vmm.h has the rest.
#pragma once

#include "platform/runtime.h"

#define JAX_EP_DRIVER(name) hip##name

namespace jax_ep::gpu {

using Allocation = hipMemGenericAllocationHandle_t;
using DriverAddress = void*;
constexpr auto kRecommended = hipMemAllocationGranularityRecommended;
constexpr auto kFileDescriptor = hipMemHandleTypePosixFileDescriptor;

// May be cached, unlike what runtime.h allocates: whether a signal pad in it shows peers' flags in time is unproven.
inline hipMemAllocationProp shareable_memory(int device) {
  hipMemAllocationProp properties{};
  properties.type = hipMemAllocationTypePinned;
  properties.requestedHandleType = kFileDescriptor;
  properties.location = {hipMemLocationTypeDevice, device};
  return properties;
}
inline hipMemAccessDesc access_from(int device) {
  return {{hipMemLocationTypeDevice, device}, hipMemAccessFlagsProtReadWrite};
}

}  // namespace jax_ep::gpu

#include "runtime/gpu/vmm.h"
