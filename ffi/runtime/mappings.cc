#include "runtime/mappings.h"

#include <map>
#include <mutex>
#include <random>
#include <set>

#include "runtime/region.h"

namespace jax_ep {
namespace {

struct Mapping {
  char* base;
  std::size_t bytes;
  std::set<int> users;  // devices
  int holders;
};

struct Mappings {
  std::mutex mutex;
  std::map<RegionName, Mapping> by_name;
};

Mappings& mappings() {
  static auto* const mappings = new Mappings;
  return *mappings;
}

}  // namespace

uint64_t number_of_this_process() {
  static const uint64_t number = [] {
    std::random_device random;
    return uint64_t{random()} << 32 | random() | 1;  // never zero
  }();
  return number;
}

char* hold_mapping(const RegionName& name, int descriptor, std::size_t bytes, const std::vector<int>& devices) {
  std::lock_guard lock(mappings().mutex);
  auto found = mappings().by_name.find(name);
  if (found == mappings().by_name.end()) {
    Mapping mapping{map_region(descriptor, bytes, devices), bytes, {}, 0};
    mapping.users.insert(devices.begin(), devices.end());
    found = mappings().by_name.emplace(name, std::move(mapping)).first;
  }
  Mapping& mapping = found->second;
  if (mapping.bytes != bytes) throw FalseRegion("it shared a region with another size than before");
  std::vector<int> further;
  for (const int device : devices)
    if (!mapping.users.count(device)) further.push_back(device);
  allow_users(mapping.base, bytes, further);
  mapping.users.insert(further.begin(), further.end());
  ++mapping.holders;
  return mapping.base;
}

void drop_mapping(const RegionName& name) {
  std::lock_guard lock(mappings().mutex);
  const auto found = mappings().by_name.find(name);
  if (--found->second.holders == 0 && unmap_region(found->second.base, found->second.bytes))
    mappings().by_name.erase(found);
}

}  // namespace jax_ep
