#include "launch.h"

#include <stdexcept>

#include "binding/extra.h"

namespace jax_ep {

ffi::TypeId CallSite::id = {};

PlatformGroup::PlatformGroup(std::vector<std::vector<int>> lines, double timeout_seconds, bool poison)
    : Group(lines, timeout_seconds, poison) {
  for (const std::vector<int>& line : lines)
    for (const int device : line) {
      const gpu::DeviceScope scope(device);
      gpu::check(load_kernels(), "loading kernels");
      if (const auto error = load_extra_kernels()) throw std::runtime_error("loading kernels: " + *error);
      gpu::check(gpu::processor_count(&processors_, device), "asking for the number of processors");
    }
}

void PlatformGroup::close() {
  Group::close();
  for (int line = 0; line < line_count(); ++line)
    for (int rank = 0; rank < size(); ++rank) {
      const gpu::DeviceScope scope(device_of({line, rank}));
      gpu::check(gpu::fill(&comm({line, rank}).heaps[rank]->abort, 1, 1), "closing the group");
    }
}

}  // namespace jax_ep
