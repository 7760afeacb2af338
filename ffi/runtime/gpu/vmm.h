// The virtual memory of CUDA and HIP under names of our own. "platform/vmm.h" says what differs, then includes this.
#pragma once

#include <cstddef>
#include <cstdint>

namespace jax_ep::gpu {

using CaptureMode = JAX_EP_RUNTIME(StreamCaptureMode);

constexpr CaptureMode kCaptureRelaxed = JAX_EP_RUNTIME(StreamCaptureModeRelaxed);

inline Error exchange_capture_mode(CaptureMode* mode) { return JAX_EP_RUNTIME(ThreadExchangeStreamCaptureMode)(mode); }

inline DriverAddress as_driver(void* address) { return reinterpret_cast<DriverAddress>(address); }
inline DriverAddress* as_driver(void** address) { return reinterpret_cast<DriverAddress*>(address); }

inline Error memory_granularity(std::size_t* bytes, int device) {
  const auto properties = shareable_memory(device);
  return JAX_EP_DRIVER(MemGetAllocationGranularity)(bytes, &properties, kRecommended);
}
inline Error create_memory(Allocation* made, std::size_t bytes, int device) {
  const auto properties = shareable_memory(device);
  return JAX_EP_DRIVER(MemCreate)(made, bytes, &properties, 0);
}
inline Error release_memory(Allocation allocation) { return JAX_EP_DRIVER(MemRelease)(allocation); }
inline Error reserve_addresses(void** base, std::size_t bytes) {
  return JAX_EP_DRIVER(MemAddressReserve)(as_driver(base), bytes, 0, DriverAddress{}, 0);
}
inline Error map_memory(void* base, std::size_t bytes, Allocation allocation) {
  return JAX_EP_DRIVER(MemMap)(as_driver(base), bytes, 0, allocation, 0);
}
inline Error unmap_memory(void* base, std::size_t bytes) { return JAX_EP_DRIVER(MemUnmap)(as_driver(base), bytes); }
inline Error free_addresses(void* base, std::size_t bytes) {
  return JAX_EP_DRIVER(MemAddressFree)(as_driver(base), bytes);
}
inline Error allow_access(void* base, std::size_t bytes, int device) {
  const auto access = access_from(device);
  return JAX_EP_DRIVER(MemSetAccess)(as_driver(base), bytes, &access, 1);
}
// The allocation that is mapped at an address; one more reference to it.
inline Error retain_allocation(Allocation* allocation, void* address) {
  return JAX_EP_DRIVER(MemRetainAllocationHandle)(allocation, address);
}
inline Error address_range(void** base, std::size_t* bytes, void* address) {
  return JAX_EP_DRIVER(MemGetAddressRange)(as_driver(base), bytes, as_driver(address));
}
inline Error export_memory(int* descriptor, Allocation allocation) {
  return JAX_EP_DRIVER(MemExportToShareableHandle)(descriptor, allocation, kFileDescriptor, 0);
}
inline Error import_memory(Allocation* allocation, int descriptor) {
  void* const handle = reinterpret_cast<void*>(static_cast<std::uintptr_t>(descriptor));
  return JAX_EP_DRIVER(MemImportFromShareableHandle)(allocation, handle, kFileDescriptor);
}

}  // namespace jax_ep::gpu
