// The platform's memory on devices and host, and the clocks of devices. Each platform has its own source.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace jax_ep {

// Zeroed memory on a device. Throws std::runtime_error.
//
// On a GPU freed memory is kept for the next request of this size with the same `owner`. A captured graph of a closed
// group may still be launched, and must then find that group's memory, or its successor's.
std::shared_ptr<void> allocate_on_device(int ordinal, std::size_t bytes, int64_t owner = 0);

// Zeroed host memory that kernels can write.
std::shared_ptr<void> allocate_on_host(std::size_t bytes, int64_t owner = 0);

// Waits until all that was launched on the devices is done. Called before memory of a closed group is used again.
void await_devices(const std::vector<int>& ordinals);

// Clears memory of a device, and waits for it.
void clear_on_device(int ordinal, void* memory, std::size_t bytes);

// Copies 64-bit words from or to memory that the device reaches, without waiting for kernels. Each word is copied
// whole, as kernels may use the memory or wait for a word meanwhile. Any thread may call. Throws std::runtime_error.
void copy_whole_words(int ordinal, void* to, const void* from, std::size_t words);
template <class T>
void copy_array(int ordinal, T* to, const T* from, std::size_t count) {
  static_assert(sizeof(T) % sizeof(uint64_t) == 0);
  copy_whole_words(ordinal, to, from, count * (sizeof(T) / sizeof(uint64_t)));
}

// One moment, by the clock that kernels read and by the host's steady clock.
struct ClockSample {
  uint64_t device_ns, host_ns;
};
// Throws std::runtime_error.
ClockSample read_clock(int ordinal);

// Lets the devices write to each other's memory. Throws std::runtime_error naming a pair that cannot.
void connect_devices(const std::vector<int>& ordinals);

}  // namespace jax_ep
