#include "runtime/region.h"

#include <fcntl.h>

#include <map>
#include <mutex>

#include "runtime/gpu/device_scope.h"

namespace jax_ep {
namespace {

// A region of this process. A freed region is kept, with its descriptor, for the next group that asks for such a
// region, as peers have it mapped already.
struct KeptRegion {
  Region region;
  int ordinal;
  std::vector<int> users;
  int64_t owner;
  bool free;
};

// Regions by their allocation. Each holds a reference to its allocation, whose number is then not used again.
struct KnownRegions {
  std::mutex mutex;
  std::map<gpu::Allocation, KeptRegion> made;
  std::map<gpu::Allocation, Region> found;  // by find_region
};

// A pool has few regions, so all are kept. An allocator with a region per buffer would fill this list.
constexpr std::size_t kMaxFound = 32;

KnownRegions& known() {
  static auto* const known = new KnownRegions;
  return *known;
}

uint64_t number_of(gpu::Allocation allocation) { return (uint64_t)allocation; }  // a pointer in HIP

// The answer for memory that cannot be shared. The driver's functions fail for it, and XLA's next call must not see
// that error.
std::optional<Region> not_shareable() {
  gpu::ignore(gpu::take_last_error());
  return std::nullopt;
}

char* map_allocation(gpu::Allocation allocation, std::size_t bytes, const std::vector<int>& users) {
  void* base = nullptr;
  gpu::check(gpu::reserve_addresses(&base, bytes), "reserving addresses");
  bool mapped = false;
  try {
    gpu::check(gpu::map_memory(base, bytes, allocation), "mapping device memory");
    mapped = true;
    allow_users(static_cast<char*>(base), bytes, users);
  } catch (...) {
    if (mapped) gpu::ignore(gpu::unmap_memory(base, bytes));
    gpu::ignore(gpu::free_addresses(base, bytes));
    throw;
  }
  return static_cast<char*>(base);
}

// The driver's descriptors would stay open in programs that this process starts.
gpu::Error export_descriptor(int* descriptor, gpu::Allocation allocation) {
  const gpu::Error error = gpu::export_memory(descriptor, allocation);
  if (error == gpu::kSuccess) fcntl(*descriptor, F_SETFD, FD_CLOEXEC);
  return error;
}

Region make_region(int ordinal, std::size_t bytes, const std::vector<int>& users, gpu::Allocation* allocation) {
  gpu::check(gpu::create_memory(allocation, bytes, ordinal), "allocating shared device memory");
  try {
    Region region{map_allocation(*allocation, bytes, users), bytes, number_of(*allocation), -1};
    const gpu::Error error = export_descriptor(&region.descriptor, *allocation);
    if (error == gpu::kSuccess) return region;
    gpu::ignore(gpu::unmap_memory(region.base, bytes));
    gpu::ignore(gpu::free_addresses(region.base, bytes));
    gpu::check(error, "exporting device memory");
    return region;
  } catch (...) {
    gpu::ignore(gpu::release_memory(*allocation));
    throw;
  }
}

std::shared_ptr<const Region> until_let_go(KeptRegion* kept) {
  kept->free = false;
  return {&kept->region, [kept](const Region*) {
            std::lock_guard lock(known().mutex);
            kept->free = true;
          }};
}

}  // namespace

std::shared_ptr<const Region> allocate_region(int ordinal, std::size_t bytes, const std::vector<int>& users,
                                              int64_t owner) {
  const gpu::DeviceScope scope(ordinal);
  const gpu::CaptureAllowsAll capture;
  std::size_t granularity = 0;
  gpu::check(gpu::memory_granularity(&granularity, ordinal), "asking for the granularity of device memory");
  bytes = (bytes + granularity - 1) / granularity * granularity;
  std::lock_guard lock(known().mutex);
  for (auto& [allocation, kept] : known().made)
    if (kept.free && kept.owner == owner && kept.ordinal == ordinal && kept.region.bytes == bytes &&
        kept.users == users)
      return until_let_go(&kept);
  gpu::Allocation allocation{};
  const Region region = make_region(ordinal, bytes, users, &allocation);
  return until_let_go(
      &known().made.emplace(allocation, KeptRegion{region, ordinal, users, owner, false}).first->second);
}

std::optional<Region> find_region(int ordinal, const void* data, std::size_t bytes) {
  const gpu::DeviceScope scope(ordinal);
  const gpu::CaptureAllowsAll capture;
  void *address = const_cast<void*>(data), *base = nullptr;
  std::size_t size = 0;
  gpu::Allocation allocation{};
  if (gpu::retain_allocation(&allocation, address) != gpu::kSuccess) return not_shareable();
  std::lock_guard lock(known().mutex);
  auto found = known().found.find(allocation);
  const auto made = known().made.find(allocation);
  if (found != known().found.end() || made != known().made.end()) {
    gpu::ignore(gpu::release_memory(allocation));
  } else {
    int descriptor = -1;
    if (known().found.size() >= kMaxFound || gpu::address_range(&base, &size, address) != gpu::kSuccess ||
        export_descriptor(&descriptor, allocation) != gpu::kSuccess) {
      gpu::ignore(gpu::release_memory(allocation));
      return not_shareable();
    }
    const Region region{static_cast<char*>(base), size, number_of(allocation), descriptor};
    found = known().found.emplace(allocation, region).first;
  }
  const Region& region = made != known().made.end() ? made->second.region : found->second;
  const auto* begin = static_cast<const char*>(data);
  if (begin < region.base || begin + bytes > region.base + region.bytes) return std::nullopt;
  return region;
}

char* map_region(int descriptor, std::size_t bytes, const std::vector<int>& users) {
  const gpu::DeviceScope scope(users.front());
  const gpu::CaptureAllowsAll capture;
  gpu::Allocation allocation{};
  gpu::check(gpu::import_memory(&allocation, descriptor), "importing another process' device memory");
  try {
    char* base = map_allocation(allocation, bytes, users);
    gpu::ignore(gpu::release_memory(allocation));  // the mapping keeps it
    return base;
  } catch (...) {
    gpu::ignore(gpu::release_memory(allocation));
    throw;
  }
}

void allow_users(char* base, std::size_t bytes, const std::vector<int>& users) {
  for (const int user : users)
    gpu::check(gpu::allow_access(base, bytes, user),
               concat("letting GPU ", user, " write to shared device memory").c_str());
}

bool unmap_region(char*, std::size_t) { return false; }

}  // namespace jax_ep
