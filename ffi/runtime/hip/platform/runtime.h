// The HIP runtime under the names that runtime/gpu uses; runtime/cuda has its twin.
#pragma once

#include <hip/hip_runtime_api.h>

#include <cstddef>

namespace jax_ep::gpu {

using Stream = hipStream_t;
using Error = hipError_t;
using Event = hipEvent_t;

constexpr Error kSuccess = hipSuccess;
constexpr Error kPeerAlreadyEnabled = hipErrorPeerAccessAlreadyEnabled;
constexpr int kWarpLanes = 64;  // threads of a coop

// Peers' flags must be seen while a kernel runs: a GPU may keep other memory of its own in caches that they do not
// reach.
#ifdef hipDeviceMallocUncached  // since ROCm 6
constexpr unsigned kSharedWithPeers = hipDeviceMallocUncached;
#else
constexpr unsigned kSharedWithPeers = hipDeviceMallocFinegrained;
#endif

inline const char* describe(Error error) { return hipGetErrorString(error); }
inline Error take_last_error() { return hipGetLastError(); }
inline Error get_device(int* device) { return hipGetDevice(device); }
inline Error set_device(int device) { return hipSetDevice(device); }
inline Error allocate(void** memory, std::size_t bytes) {
  return hipExtMallocWithFlags(memory, bytes, kSharedWithPeers);
}
inline Error fill(void* memory, int byte, std::size_t bytes) { return hipMemset(memory, byte, bytes); }
inline Error allocate_host(void** memory, std::size_t bytes) {
  return hipHostMalloc(memory, bytes, hipHostMallocPortable | hipHostMallocMapped);
}
inline Error copy(void* to, const void* from, std::size_t bytes, Stream stream) {
  return hipMemcpyAsync(to, from, bytes, hipMemcpyDeviceToDevice, stream);
}
inline Error copy_anywhere(void* to, const void* from, std::size_t bytes, Stream stream) {
  return hipMemcpyAsync(to, from, bytes, hipMemcpyDefault, stream);
}
// A stream without order to the default stream.
inline Error create_stream(Stream* stream) { return hipStreamCreateWithFlags(stream, hipStreamNonBlocking); }
inline bool is_capturing(Stream stream) {
  hipStreamCaptureStatus status = hipStreamCaptureStatusNone;
  return hipStreamIsCapturing(stream, &status) == hipSuccess && status != hipStreamCaptureStatusNone;
}
inline Error create_event(Event* event) { return hipEventCreateWithFlags(event, hipEventDisableTiming); }
inline Error destroy_event(Event event) { return hipEventDestroy(event); }
inline Error record_event(Event event, Stream stream) { return hipEventRecord(event, stream); }
inline Error wait_event(Stream stream, Event event) { return hipStreamWaitEvent(stream, event, 0); }
inline Error synchronize() { return hipDeviceSynchronize(); }
inline Error synchronize_stream(Stream stream) { return hipStreamSynchronize(stream); }
inline Error can_access_peer(int* can, int device, int peer) { return hipDeviceCanAccessPeer(can, device, peer); }
inline Error enable_peer(int peer) { return hipDeviceEnablePeerAccess(peer, 0); }
inline Error sm_count(int* count, int device) {
  return hipDeviceGetAttribute(count, hipDeviceAttributeMultiprocessorCount, device);
}
inline Error shared_memory(int* bytes, int device) {
  return hipDeviceGetAttribute(bytes, hipDeviceAttributeMaxSharedMemoryPerBlock, device);
}
inline Error allow_shared(const void* kernel, int bytes) {
  return hipFuncSetAttribute(kernel, hipFuncAttributeMaxDynamicSharedMemorySize, bytes);
}
inline Error load_kernel(const void* kernel) {
  hipFuncAttributes attributes;
  return hipFuncGetAttributes(&attributes, kernel);
}

}  // namespace jax_ep::gpu
