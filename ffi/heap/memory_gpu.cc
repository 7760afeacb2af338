#include <cstring>
#include <stdexcept>
#include <string>

#include "heap/memory.h"
#include "platform/gpu/device_scope.h"
#include "runtime.h"  // of the GPU platform this library is built for

namespace jax_ep {

// Neither is ever freed: a captured graph of a closed group may still be launched, and must find its abort word.
std::shared_ptr<void> allocate_on_device(int ordinal, std::size_t bytes) {
  const gpu::DeviceScope scope(ordinal);
  void* memory = nullptr;
  gpu::check(gpu::allocate(&memory, bytes), "allocating the symmetric heap");
  clear_on_device(ordinal, memory, bytes);
  return {memory, [](void*) {}};
}

void clear_on_device(int ordinal, void* memory, std::size_t bytes) {
  const gpu::DeviceScope scope(ordinal);
  gpu::check(gpu::fill(memory, 0, bytes), "clearing the symmetric heap");
  gpu::check(gpu::synchronize(), "clearing the symmetric heap");
}

void signal_device(int ordinal, uint64_t* word, uint8_t value) {
  const gpu::DeviceScope scope(ordinal);
  gpu::check(gpu::fill(word, value, 1), "writing to the symmetric heap");
}

std::shared_ptr<void> allocate_on_host(std::size_t bytes) {
  void* memory = nullptr;
  gpu::check(gpu::allocate_host(&memory, bytes), "allocating host memory");
  std::memset(memory, 0, bytes);
  return {memory, [](void*) {}};
}

void connect_devices(const std::vector<int>& ordinals) {
  for (const int device : ordinals) {
    const gpu::DeviceScope scope(device);
    for (const int peer : ordinals) {
      if (peer == device) continue;
      int can = 0;
      gpu::check(gpu::can_access_peer(&can, device, peer), "asking for peer access");
      if (!can)
        throw std::runtime_error("GPU " + std::to_string(device) + " cannot write to GPU " + std::to_string(peer) +
                                 ": the group needs peer-to-peer links");
      const gpu::Error error = gpu::enable_peer(peer);
      if (error == gpu::kPeerAlreadyEnabled)
        gpu::ignore(gpu::take_last_error());  // XLA has enabled it; a sticky error would make its next call fail
      else
        gpu::check(error, "enabling peer access");
    }
  }
}

}  // namespace jax_ep
