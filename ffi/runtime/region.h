// Memory that other processes can map: the signal pads and the staging of a group, and XLA's pool. Each platform has
// its own source.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <vector>

namespace jax_ep {

// The memory of another process differs from its description.
class FalseRegion : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct Region {
  char* base;
  std::size_t bytes;
  uint64_t id;     // unique in this process, for its whole life
  int descriptor;  // for other processes
};

// Memory on a device that the devices `users` of this process can write to, until the last holder frees it. On a GPU a
// captured graph of a closed group may still be launched. Therefore a freed region keeps its mapping, number and
// descriptor there, for the next request of this size with the same `owner` (memory.h). Throws std::runtime_error.
std::shared_ptr<const Region> allocate_region(int ordinal, std::size_t bytes, const std::vector<int>& users,
                                              int64_t owner = 0);

// The region that holds all of `data`, if other processes can map that memory. The region lives as long as the process.
std::optional<Region> find_region(int ordinal, const void* data, std::size_t bytes);

// Maps a region of another process for the devices `users`. Throws std::runtime_error, and FalseRegion if the platform
// can tell.
char* map_region(int descriptor, std::size_t bytes, const std::vector<int>& users);

// Lets further devices of this process write to a mapped region. Throws std::runtime_error.
void allow_users(char* base, std::size_t bytes, const std::vector<int>& users);

// Unmaps a region that is no longer used. Returns false if the mapping must stay: see allocate_region.
bool unmap_region(char* base, std::size_t bytes);

}  // namespace jax_ep
