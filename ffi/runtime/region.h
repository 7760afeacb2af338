// Memory that other processes can map: the heaps and the staging of a group, and XLA's pool. One source per platform.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <vector>

namespace jax_ep {

// Thrown if what another process gave is not what it said it was.
class FalseRegion : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct Region {
  char* base;
  std::size_t bytes;
  uint64_t id;     // no other region of this process ever has it
  int descriptor;  // by which another process maps it
};

// Memory on a device that the devices `users` of this process can write to, until the last holder lets go. On a CPU it
// is then freed. On a GPU a captured graph of a closed group may still be launched: there the region stays as it is,
// mapping, number and descriptor, and is handed out again when the same `owner` asks for such a one (memory.h). Throws
// std::runtime_error.
std::shared_ptr<const Region> allocate_region(int ordinal, std::size_t bytes, const std::vector<int>& users,
                                              int64_t owner = 0);

// The region that holds all of `data`, if it is in memory that other processes can map. It lives as long as the
// process.
std::optional<Region> find_region(int ordinal, const void* data, std::size_t bytes);

// Maps a region of another process for the devices `users`. Throws std::runtime_error, and FalseRegion where it can
// tell.
char* map_region(int descriptor, std::size_t bytes, const std::vector<int>& users);

// Lets further devices of this process write to a mapped region. Throws std::runtime_error.
void allow_users(char* base, std::size_t bytes, const std::vector<int>& users);

// Ends a mapping that nobody uses any more. False where it must stay: see allocate_region.
bool unmap_region(char* base, std::size_t bytes);

}  // namespace jax_ep
