// CUDA's virtual memory under the names that runtime/gpu uses; runtime/hip has its twin. Functions of the driver are
// found by name, as a machine without GPUs has no driver to link.
#pragma once

#include <cuda.h>

#include "platform/runtime.h"

namespace jax_ep::gpu {

using Allocation = CUmemGenericAllocationHandle;
using CaptureMode = cudaStreamCaptureMode;

constexpr CaptureMode kCaptureRelaxed = cudaStreamCaptureModeRelaxed;

inline Error exchange_capture_mode(CaptureMode* mode) { return cudaThreadExchangeStreamCaptureMode(mode); }

// A function of the driver, or null where there is none.
template <class Function>
Function* driver(const char* name) {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found{};
  const Error error = cudaGetDriverEntryPointByVersion(name, &entry, 11020, cudaEnableDefault, &found);
  return error == kSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<Function*>(entry) : nullptr;
}

// The driver's errors have the numbers of the runtime's.
template <class Function, class... Arguments>
Error call_driver(Function* function, Arguments... arguments) {
  return function ? static_cast<Error>(function(arguments...)) : cudaErrorNotSupported;
}

inline CUdeviceptr as_driver(const void* address) { return reinterpret_cast<CUdeviceptr>(address); }

inline CUmemAllocationProp shareable_memory(int device) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, device};
  return properties;
}

inline Error memory_granularity(std::size_t* bytes, int device) {
  static auto* const ask = driver<decltype(cuMemGetAllocationGranularity)>("cuMemGetAllocationGranularity");
  const CUmemAllocationProp properties = shareable_memory(device);
  return call_driver(ask, bytes, &properties, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
}
inline Error create_memory(Allocation* made, std::size_t bytes, int device) {
  static auto* const create = driver<decltype(cuMemCreate)>("cuMemCreate");
  const CUmemAllocationProp properties = shareable_memory(device);
  return call_driver(create, made, bytes, &properties, 0);
}
inline Error release_memory(Allocation allocation) {
  static auto* const release = driver<decltype(cuMemRelease)>("cuMemRelease");
  return call_driver(release, allocation);
}
inline Error reserve_addresses(void** base, std::size_t bytes) {
  static auto* const reserve = driver<decltype(cuMemAddressReserve)>("cuMemAddressReserve");
  return call_driver(reserve, reinterpret_cast<CUdeviceptr*>(base), bytes, 0, 0, 0);
}
inline Error map_memory(void* base, std::size_t bytes, Allocation allocation) {
  static auto* const map = driver<decltype(cuMemMap)>("cuMemMap");
  return call_driver(map, as_driver(base), bytes, 0, allocation, 0);
}
inline Error unmap_memory(void* base, std::size_t bytes) {
  static auto* const unmap = driver<decltype(cuMemUnmap)>("cuMemUnmap");
  return call_driver(unmap, as_driver(base), bytes);
}
inline Error free_addresses(void* base, std::size_t bytes) {
  static auto* const free = driver<decltype(cuMemAddressFree)>("cuMemAddressFree");
  return call_driver(free, as_driver(base), bytes);
}
inline Error allow_access(void* base, std::size_t bytes, int device) {
  static auto* const allow = driver<decltype(cuMemSetAccess)>("cuMemSetAccess");
  const CUmemAccessDesc access{{CU_MEM_LOCATION_TYPE_DEVICE, device}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  return call_driver(allow, as_driver(base), bytes, &access, 1);
}
// The allocation that is mapped at an address; one more reference to it.
inline Error retain_allocation(Allocation* allocation, void* address) {
  static auto* const retain = driver<decltype(cuMemRetainAllocationHandle)>("cuMemRetainAllocationHandle");
  return call_driver(retain, allocation, address);
}
inline Error address_range(void** base, std::size_t* bytes, void* address) {
  static auto* const ask = driver<decltype(cuMemGetAddressRange)>("cuMemGetAddressRange");
  return call_driver(ask, reinterpret_cast<CUdeviceptr*>(base), bytes, as_driver(address));
}
inline Error export_memory(int* descriptor, Allocation allocation) {
  static auto* const give = driver<decltype(cuMemExportToShareableHandle)>("cuMemExportToShareableHandle");
  return call_driver(give, descriptor, allocation, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
}
inline Error import_memory(Allocation* allocation, int descriptor) {
  static auto* const take = driver<decltype(cuMemImportFromShareableHandle)>("cuMemImportFromShareableHandle");
  void* handle = reinterpret_cast<void*>(static_cast<std::uintptr_t>(descriptor));
  return call_driver(take, allocation, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
}

}  // namespace jax_ep::gpu
