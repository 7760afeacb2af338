// Regions of other processes as this one sees them. Each is mapped once, whatever the number of groups that use it.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace jax_ep {

// A number of this process that no other has: with the number of a region, its name on this host.
uint64_t number_of_this_process();

using RegionName = std::pair<uint64_t, uint64_t>;  // by owner and region

// Where a region is, for as long as it is held: every call wants a `drop_mapping`. Throws std::runtime_error and
// FalseRegion.
char* hold_mapping(const RegionName& name, int descriptor, std::size_t bytes, const std::vector<int>& devices);

void drop_mapping(const RegionName& name);

}  // namespace jax_ep
