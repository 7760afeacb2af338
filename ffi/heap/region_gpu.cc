#include <map>
#include <mutex>
#include <string>

#include "heap/region.h"
#include "platform/gpu/capture_scope.h"
#include "platform/gpu/device_scope.h"
#include "vmm.h"  // of the GPU platform this library is built for

namespace jax_ep {
namespace {

// Regions of this process by their allocation. Each holds a reference to it, so that its number is not used again.
struct Known {
  std::mutex mutex;
  std::map<gpu::Allocation, Region> regions;
  int found = 0;  // of them, by find_region
};

// A pool has few regions. Who makes one per buffer would have them all kept here.
constexpr int kMostFound = 32;

Known& known() {
  static auto* const known = new Known;
  return *known;
}

uint64_t number_of(gpu::Allocation allocation) { return (uint64_t)allocation; }  // a pointer in HIP

// Of memory of another kind, for which the driver's questions fail; XLA must not meet that error in its next call.
std::optional<Region> not_shareable() {
  gpu::ignore(gpu::take_last_error());
  return std::nullopt;
}

char* map_allocation(gpu::Allocation allocation, std::size_t bytes, const std::vector<int>& users) {
  void* base = nullptr;
  gpu::check(gpu::reserve_addresses(&base, bytes), "reserving addresses");
  gpu::check(gpu::map_memory(base, bytes, allocation), "mapping device memory");
  allow_users(static_cast<char*>(base), bytes, users);
  return static_cast<char*>(base);
}

}  // namespace

Region allocate_region(int ordinal, std::size_t bytes, const std::vector<int>& users) {
  const gpu::DeviceScope scope(ordinal);
  const gpu::CaptureAllowsAll capture;
  std::size_t granularity = 0;
  gpu::check(gpu::memory_granularity(&granularity, ordinal), "asking for the granularity of device memory");
  bytes = (bytes + granularity - 1) / granularity * granularity;
  gpu::Allocation allocation{};
  gpu::check(gpu::create_memory(&allocation, bytes, ordinal), "allocating shared device memory");
  int descriptor = -1;
  gpu::check(gpu::export_memory(&descriptor, allocation), "exporting device memory");
  const Region region{map_allocation(allocation, bytes, users), bytes, number_of(allocation), descriptor};
  std::lock_guard lock(known().mutex);
  known().regions.emplace(allocation, region);
  return region;
}

std::optional<Region> find_region(int ordinal, const void* data, std::size_t bytes) {
  const gpu::DeviceScope scope(ordinal);
  const gpu::CaptureAllowsAll capture;
  void *address = const_cast<void*>(data), *base = nullptr;
  std::size_t size = 0;
  gpu::Allocation allocation{};
  if (gpu::retain_allocation(&allocation, address) != gpu::kSuccess) return not_shareable();
  std::lock_guard lock(known().mutex);
  auto found = known().regions.find(allocation);
  if (found != known().regions.end()) {
    gpu::ignore(gpu::release_memory(allocation));
  } else {
    int descriptor = -1;
    if (known().found >= kMostFound || gpu::address_range(&base, &size, address) != gpu::kSuccess ||
        gpu::export_memory(&descriptor, allocation) != gpu::kSuccess) {
      gpu::ignore(gpu::release_memory(allocation));
      return not_shareable();
    }
    const Region region{static_cast<char*>(base), size, number_of(allocation), descriptor};
    found = known().regions.emplace(allocation, region).first;
    ++known().found;
  }
  const Region& region = found->second;
  const auto* begin = static_cast<const char*>(data);
  if (begin < region.base || begin + bytes > region.base + region.bytes) return std::nullopt;
  return region;
}

char* map_region(int descriptor, std::size_t bytes, const std::vector<int>& users) {
  const gpu::DeviceScope scope(users.front());
  gpu::Allocation allocation{};
  gpu::check(gpu::import_memory(&allocation, descriptor), "importing another process' device memory");
  char* base = map_allocation(allocation, bytes, users);
  gpu::check(gpu::release_memory(allocation), "releasing imported device memory");  // the mapping keeps it
  return base;
}

void allow_users(char* base, std::size_t bytes, const std::vector<int>& users) {
  for (const int user : users)
    gpu::check(gpu::allow_access(base, bytes, user),
               ("letting GPU " + std::to_string(user) + " write to shared device memory").c_str());
}

}  // namespace jax_ep
