#include "platform/launch.h"

#include <climits>
#include <stdexcept>

namespace jax_ep {

namespace {

// The model that fits every device: where they differ, the fewest SMs and the least shared memory.
HardwareModel model_of(const std::vector<int>& devices) {
  int least_sms = INT_MAX, least_shared = INT_MAX;
  for (const int device : devices) {
    int sms = 0, shared_bytes = 0;
    gpu::check(gpu::sm_count(&sms, device), "asking for the number of SMs");
    gpu::check(gpu::shared_memory(&shared_bytes, device), "asking for the shared memory of a CTA");
    least_sms = std::min(sms, least_sms);
    least_shared = std::min(shared_bytes, least_shared);
  }
  return hardware_model(least_sms, least_shared, gpu::kWarpLanes);
}

}  // namespace

PlatformGroup::PlatformGroup(std::vector<std::vector<int>> lines, double timeout_seconds, bool poison,
                             Neighbours neighbours, int64_t id)
    : Group(std::move(lines), timeout_seconds, poison, std::move(neighbours), id), model_(model_of(local_devices())) {
  for (const int device : local_devices()) {
    const gpu::DeviceScope scope(device);
    gpu::check(load_kernels(model_.shared_bytes), "loading kernels");
    if (const auto error = load_matmul_kernels()) throw std::runtime_error("loading kernels: " + *error);
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
