#include "platform/launch.h"

#include <stdexcept>

namespace jax_ep {

namespace {

HardwareModel model_of(int device) {
  std::string architecture;
  int sms = 0, shared_bytes = 0;
  gpu::check(gpu::architecture(&architecture, device), "asking for the architecture of a device");
  gpu::check(gpu::sm_count(&sms, device), "asking for the number of SMs");
  gpu::check(gpu::shared_memory(&shared_bytes, device), "asking for the shared memory of a block");
  return hardware_model(architecture, sms, shared_bytes, gpu::kWarpLanes);
}

}  // namespace

PlatformGroup::PlatformGroup(std::vector<std::vector<int>> lines, double timeout_seconds, bool poison,
                             Neighbours neighbours, int64_t id)
    : Group(std::move(lines), timeout_seconds, poison, std::move(neighbours), id) {
  for (int line = 0; line < line_count(); ++line)
    for (const int device : local_devices(line)) {
      const gpu::DeviceScope scope(device);
      model_ = model_of(device);
      gpu::check(load_kernels(model_.shared_bytes), "loading kernels");
      if (const auto error = load_extra_kernels()) throw std::runtime_error("loading kernels: " + *error);
    }
  orders_.resize(line_count() * size());
}

void PlatformGroup::close() {
  Group::close();
  for (int line = 0; line < line_count(); ++line)
    for (int rank = 0; rank < size(); ++rank)
      if (is_local({line, rank})) raise_abort({line, rank}, rank, /*culprit=*/0);
  release_regions();
}

}  // namespace jax_ep
