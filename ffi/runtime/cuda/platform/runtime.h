// The CUDA runtime under the names that runtime/gpu uses; runtime/hip has its twin.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

namespace jax_ep::gpu {

using Stream = cudaStream_t;
using Error = cudaError_t;
using Event = cudaEvent_t;

constexpr Error kSuccess = cudaSuccess;
constexpr Error kPeerAlreadyEnabled = cudaErrorPeerAccessAlreadyEnabled;
constexpr int kWarpLanes = 32;  // threads of a coop

inline const char* describe(Error error) { return cudaGetErrorString(error); }
inline Error take_last_error() { return cudaGetLastError(); }
inline Error get_device(int* device) { return cudaGetDevice(device); }
inline Error set_device(int device) { return cudaSetDevice(device); }
inline Error allocate(void** memory, std::size_t bytes) { return cudaMalloc(memory, bytes); }
inline Error fill(void* memory, int byte, std::size_t bytes) { return cudaMemset(memory, byte, bytes); }
inline Error allocate_host(void** memory, std::size_t bytes) {
  return cudaHostAlloc(memory, bytes, cudaHostAllocPortable | cudaHostAllocMapped);
}
inline Error copy(void* to, const void* from, std::size_t bytes, Stream stream) {
  return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream);
}
inline Error copy_anywhere(void* to, const void* from, std::size_t bytes, Stream stream) {
  return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream);
}
// A stream without order to the default stream.
inline Error create_stream(Stream* stream) { return cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking); }
inline bool is_capturing(Stream stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  return cudaStreamIsCapturing(stream, &status) == cudaSuccess && status != cudaStreamCaptureStatusNone;
}
inline Error create_event(Event* event) { return cudaEventCreateWithFlags(event, cudaEventDisableTiming); }
inline Error destroy_event(Event event) { return cudaEventDestroy(event); }
inline Error record_event(Event event, Stream stream) { return cudaEventRecord(event, stream); }
inline Error wait_event(Stream stream, Event event) { return cudaStreamWaitEvent(stream, event, 0); }
inline Error synchronize() { return cudaDeviceSynchronize(); }
inline Error synchronize_stream(Stream stream) { return cudaStreamSynchronize(stream); }
inline Error can_access_peer(int* can, int device, int peer) { return cudaDeviceCanAccessPeer(can, device, peer); }
inline Error enable_peer(int peer) { return cudaDeviceEnablePeerAccess(peer, 0); }
inline Error sm_count(int* count, int device) {
  return cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device);
}
inline Error shared_memory(int* bytes, int device) {
  return cudaDeviceGetAttribute(bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
}
inline Error allow_shared(const void* kernel, int bytes) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}
inline Error load_kernel(const void* kernel) {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, kernel);
}

}  // namespace jax_ep::gpu
