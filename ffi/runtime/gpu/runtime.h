// The runtime of CUDA or HIP under names of our own. "platform/runtime.h" includes this file, with JAX_EP_RUNTIME(name)
// for its prefix.
#pragma once

#include <cstddef>

namespace jax_ep::gpu {

using Stream = JAX_EP_RUNTIME(Stream_t);
using Error = JAX_EP_RUNTIME(Error_t);
using Event = JAX_EP_RUNTIME(Event_t);

constexpr Error kSuccess = JAX_EP_RUNTIME(Success);
constexpr Error kPeerAlreadyEnabled = JAX_EP_RUNTIME(ErrorPeerAccessAlreadyEnabled);

inline const char* describe(Error error) { return JAX_EP_RUNTIME(GetErrorString)(error); }
inline Error take_last_error() { return JAX_EP_RUNTIME(GetLastError)(); }
inline Error get_device(int* device) { return JAX_EP_RUNTIME(GetDevice)(device); }
inline Error set_device(int device) { return JAX_EP_RUNTIME(SetDevice)(device); }
inline Error fill(void* memory, int byte, std::size_t bytes) { return JAX_EP_RUNTIME(Memset)(memory, byte, bytes); }
inline Error copy(void* to, const void* from, std::size_t bytes, Stream stream) {
  return JAX_EP_RUNTIME(MemcpyAsync)(to, from, bytes, JAX_EP_RUNTIME(MemcpyDeviceToDevice), stream);
}
inline Error copy_anywhere(void* to, const void* from, std::size_t bytes, Stream stream) {
  return JAX_EP_RUNTIME(MemcpyAsync)(to, from, bytes, JAX_EP_RUNTIME(MemcpyDefault), stream);
}
// A stream without order to the default stream.
inline Error create_stream(Stream* stream) {
  return JAX_EP_RUNTIME(StreamCreateWithFlags)(stream, JAX_EP_RUNTIME(StreamNonBlocking));
}
inline bool is_capturing(Stream stream) {
  auto status = JAX_EP_RUNTIME(StreamCaptureStatusNone);
  return JAX_EP_RUNTIME(StreamIsCapturing)(stream, &status) == kSuccess &&
         status != JAX_EP_RUNTIME(StreamCaptureStatusNone);
}
inline Error create_event(Event* event) {
  return JAX_EP_RUNTIME(EventCreateWithFlags)(event, JAX_EP_RUNTIME(EventDisableTiming));
}
inline Error destroy_event(Event event) { return JAX_EP_RUNTIME(EventDestroy)(event); }
inline Error record_event(Event event, Stream stream) { return JAX_EP_RUNTIME(EventRecord)(event, stream); }
inline Error wait_event(Stream stream, Event event) { return JAX_EP_RUNTIME(StreamWaitEvent)(stream, event, 0); }
inline Error synchronize() { return JAX_EP_RUNTIME(DeviceSynchronize)(); }
inline Error synchronize_stream(Stream stream) { return JAX_EP_RUNTIME(StreamSynchronize)(stream); }
inline Error can_access_peer(int* can, int device, int peer) {
  return JAX_EP_RUNTIME(DeviceCanAccessPeer)(can, device, peer);
}
inline Error enable_peer(int peer) { return JAX_EP_RUNTIME(DeviceEnablePeerAccess)(peer, 0); }
inline Error allow_shared(const void* kernel, int bytes) {
  return JAX_EP_RUNTIME(FuncSetAttribute)(kernel, JAX_EP_RUNTIME(FuncAttributeMaxDynamicSharedMemorySize), bytes);
}
inline Error load_kernel(const void* kernel) {
  JAX_EP_RUNTIME(FuncAttributes) attributes;
  return JAX_EP_RUNTIME(FuncGetAttributes)(&attributes, kernel);
}

}  // namespace jax_ep::gpu
