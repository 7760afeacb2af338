// A GPU runtime that is the host, for what runtime/ asks of one; a twin of ffi/runtime/cuda/platform/runtime.h.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <cstring>

namespace jax_ep::gpu {

using Stream = void*;
enum Error { kSuccess, kPeerAlreadyEnabled, kFailed };

constexpr int kWarpLanes = 64;  // threads of a coop

inline const char* describe(Error) { return "the fake runtime refused"; }
inline Error take_last_error() { return kSuccess; }
inline Error get_device(int* device) { return *device = 0, kSuccess; }
inline Error set_device(int) { return kSuccess; }
inline Error allocate(void** memory, std::size_t bytes) {
  *memory = std::aligned_alloc(128, (bytes + 127) / 128 * 128);
  return kSuccess;
}
inline Error fill(void* memory, int byte, std::size_t bytes) { return std::memset(memory, byte, bytes), kSuccess; }
inline Error allocate_host(void** memory, std::size_t bytes) { return allocate(memory, bytes); }
inline Error copy_anywhere(void* to, const void* from, std::size_t bytes, Stream) {
  return std::memcpy(to, from, bytes), kSuccess;
}
inline Error create_stream(Stream* stream) { return *stream = nullptr, kSuccess; }
inline Error synchronize() { return kSuccess; }
inline Error synchronize_stream(Stream) { return kSuccess; }
inline Error can_access_peer(int* can, int, int) { return *can = 1, kSuccess; }
inline Error enable_peer(int) { return kSuccess; }

}  // namespace jax_ep::gpu
