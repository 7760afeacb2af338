// Memory that other processes can map: the heaps and the staging of a group, and XLA's pool. One source per platform.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace jax_ep {

// Lives as long as the process, with its descriptor: a captured graph of a closed group may still be launched.
struct Region {
  char* base;
  std::size_t bytes;
  uint64_t id;     // no other region of this process ever has it
  int descriptor;  // by which another process maps it
};

// Memory on a device that the devices `users` of this process can write to. Throws std::runtime_error.
Region allocate_region(int ordinal, std::size_t bytes, const std::vector<int>& users);

// The region that holds all of `data`, if it is in memory that other processes can map.
std::optional<Region> find_region(int ordinal, const void* data, std::size_t bytes);

// Maps a region of another process for the devices `users`. Throws std::runtime_error.
char* map_region(int descriptor, std::size_t bytes, const std::vector<int>& users);

// Lets further devices of this process write to a mapped region. Throws std::runtime_error.
void allow_users(char* base, std::size_t bytes, const std::vector<int>& users);

}  // namespace jax_ep
