// A table in device memory with a row for each region: the difference between a peer's address and this rank's, by
// peer. Kernels read it, so that a launch passes only one pointer for each buffer.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace jax_ep {

class PeerOffsets {
 public:
  // The table of a rank on this device; `owner` as in memory.h. Throws std::runtime_error.
  PeerOffsets(int device, int64_t owner);

  // The row of a region: by peer, the number to add to an address here. `peer_offsets` must be the same in all calls
  // for a region. Any thread may call. Throws std::runtime_error.
  const int64_t* row(uint64_t region, const std::vector<int64_t>& peer_offsets);

 private:
  static constexpr std::size_t kMaxRegions = 256;

  const int device_;
  const std::shared_ptr<void> memory_;
  std::mutex mutex_;
  std::map<uint64_t, const int64_t*> rows_;  // by region
};

}  // namespace jax_ep
