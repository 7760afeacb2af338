#include "launch.h"

namespace jax_ep {

ffi::TypeId CallSite::id = {};

PlatformGroup::PlatformGroup(std::vector<std::vector<int>> lines, double timeout_seconds, bool poison)
    : Group(lines, timeout_seconds, poison) {
  for (const std::vector<int>& line : lines)
    for (const int device : line) {
      const gpu::DeviceScope scope(device);
      gpu::check(load_kernels(), "loading kernels");
      gpu::check(gpu::processor_count(&processors_, device), "asking for the number of processors");
    }
}

}  // namespace jax_ep
