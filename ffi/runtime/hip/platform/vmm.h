// HIP's virtual memory under the names that runtime/gpu uses; runtime/cuda has its twin.
#pragma once

#include <cstdint>

#include "platform/runtime.h"

namespace jax_ep::gpu {

using Allocation = hipMemGenericAllocationHandle_t;
using CaptureMode = hipStreamCaptureMode;

constexpr CaptureMode kCaptureRelaxed = hipStreamCaptureModeRelaxed;

inline Error exchange_capture_mode(CaptureMode* mode) { return hipThreadExchangeStreamCaptureMode(mode); }

// May be cached, unlike what runtime.h allocates: whether a signal pad in it shows peers' flags in time is unproven.
inline hipMemAllocationProp shareable_memory(int device) {
  hipMemAllocationProp properties{};
  properties.type = hipMemAllocationTypePinned;
  properties.requestedHandleType = hipMemHandleTypePosixFileDescriptor;
  properties.location = {hipMemLocationTypeDevice, device};
  return properties;
}

inline Error memory_granularity(std::size_t* bytes, int device) {
  const hipMemAllocationProp properties = shareable_memory(device);
  return hipMemGetAllocationGranularity(bytes, &properties, hipMemAllocationGranularityRecommended);
}
inline Error create_memory(Allocation* made, std::size_t bytes, int device) {
  const hipMemAllocationProp properties = shareable_memory(device);
  return hipMemCreate(made, bytes, &properties, 0);
}
inline Error release_memory(Allocation allocation) { return hipMemRelease(allocation); }
inline Error reserve_addresses(void** base, std::size_t bytes) {
  return hipMemAddressReserve(base, bytes, 0, nullptr, 0);
}
inline Error map_memory(void* base, std::size_t bytes, Allocation allocation) {
  return hipMemMap(base, bytes, 0, allocation, 0);
}
inline Error unmap_memory(void* base, std::size_t bytes) { return hipMemUnmap(base, bytes); }
inline Error free_addresses(void* base, std::size_t bytes) { return hipMemAddressFree(base, bytes); }
inline Error allow_access(void* base, std::size_t bytes, int device) {
  const hipMemAccessDesc access{{hipMemLocationTypeDevice, device}, hipMemAccessFlagsProtReadWrite};
  return hipMemSetAccess(base, bytes, &access, 1);
}
// The allocation that is mapped at an address; one more reference to it.
inline Error retain_allocation(Allocation* allocation, void* address) {
  return hipMemRetainAllocationHandle(allocation, address);
}
inline Error address_range(void** base, std::size_t* bytes, void* address) {
  return hipMemGetAddressRange(base, bytes, address);
}
inline Error export_memory(int* descriptor, Allocation allocation) {
  return hipMemExportToShareableHandle(descriptor, allocation, hipMemHandleTypePosixFileDescriptor, 0);
}
inline Error import_memory(Allocation* allocation, int descriptor) {
  void* handle = reinterpret_cast<void*>(static_cast<std::uintptr_t>(descriptor));
  return hipMemImportFromShareableHandle(allocation, handle, hipMemHandleTypePosixFileDescriptor);
}

}  // namespace jax_ep::gpu
