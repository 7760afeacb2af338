#include "runtime/peer_offsets.h"

#include <stdexcept>

#include "comm/signal_pad.h"
#include "comm/text.h"
#include "runtime/memory.h"

namespace jax_ep {

PeerOffsets::PeerOffsets(int device, int64_t owner)
    : device_(device), memory_(allocate_on_device(device, kMaxRegions * kMaxRanks * sizeof(int64_t), owner)) {}

const int64_t* PeerOffsets::row(uint64_t region, const std::vector<int64_t>& peer_offsets) {
  const std::lock_guard lock(mutex_);
  if (const auto found = rows_.find(region); found != rows_.end()) return found->second;
  if (rows_.size() == kMaxRegions)
    throw std::runtime_error(
        concat("jax_ep: a group over several processes uses at most ", kMaxRegions, " regions of memory"));
  auto* const row = static_cast<int64_t*>(memory_.get()) + rows_.size() * kMaxRanks;
  copy_array(device_, row, peer_offsets.data(), peer_offsets.size());
  return rows_[region] = row;
}

}  // namespace jax_ep
