// A table in device memory with a row for each region: the difference between a peer's address and this rank's, by
// peer. Kernels read it, so that a launch passes only one pointer for each buffer.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <vector>

#include "comm/signal_pad.h"
#include "comm/text.h"
#include "runtime/memory.h"

namespace jax_ep {

class PeerOffsets {
 public:
  // The table of a rank on this device; `owner` as in memory.h. Throws std::runtime_error.
  PeerOffsets(int device, int64_t owner)
      : device_(device), memory_(allocate_on_device(device, kMaxRegions * kMaxRanks * sizeof(int64_t), owner)) {}

  // The row of a region: by peer, the number to add to an address here. `peer_offsets` must be the same in all calls
  // for a region. Any thread may call. Throws std::runtime_error.
  const int64_t* row(uint64_t region, const std::vector<int64_t>& peer_offsets) {
    const std::lock_guard lock(mutex_);
    if (const auto found = rows_.find(region); found != rows_.end()) return found->second;
    if (rows_.size() == kMaxRegions)
      throw std::runtime_error(
          concat("jax_ep: a group over several processes uses at most ", kMaxRegions, " regions of memory"));
    auto* const row = static_cast<int64_t*>(memory_.get()) + rows_.size() * kMaxRanks;
    copy_array(device_, row, peer_offsets.data(), peer_offsets.size());
    return rows_[region] = row;
  }

 private:
  static constexpr std::size_t kMaxRegions = 256;

  const int device_;
  const std::shared_ptr<void> memory_;
  std::mutex mutex_;
  std::map<uint64_t, const int64_t*> rows_;  // by region
};

}  // namespace jax_ep
