// RowWriter by Hopper's bulk copies: rows go from registers to shared memory and leave from there on their own, so that
// a slow link holds up nobody's loads.
#pragma once

#include "device/target/cuda_bulk.h"
#include "device/target/plain_writer.h"

namespace jax_ep {

class RowWriter {
 public:
  static constexpr int kStages = 4;

  JAX_EP_FN explicit RowWriter(const Team& team)
      : team_(team), plain_(team), stage_bytes_(team.shared_bytes / kStages / 128 * 128) {}

  template <class Pieces, class T, int kPieces>
  JAX_EP_FN void put(const Pieces (&pieces)[kPieces], T* row, int first, int hidden, bool words) {
    constexpr int kBytes = kPieces * Team::lanes * static_cast<int>(sizeof(Pieces));
    if (!bulk::kAvailable || !words || stage_bytes_ < kBytes) return plain_.put(pieces, row, first, hidden, words);
    auto* stage = reinterpret_cast<Pieces*>(team_.shared + put_++ % kStages * stage_bytes_);
    bulk::wait_read<kStages - 1>();
    team_.sync();
    for (int i = 0; i < kPieces; ++i) stage[i * Team::lanes + team_.lane] = pieces[i];
    bulk::proxy_fence();
    team_.sync();
    if (team_.lane == 0) {
      const int left = (hidden - first) * static_cast<int>(sizeof(T));
      bulk::store(reinterpret_cast<char*>(row + first), reinterpret_cast<const char*>(stage),
                  left < kBytes ? left : kBytes);
    }
    bulk::commit();
  }

  JAX_EP_FN int mark() const { return static_cast<int>(put_); }

  JAX_EP_FN void complete_to(int mark) {
    if (!bulk::kAvailable) return team_.sync();
    const int pending = static_cast<int>(put_) - mark;
    if (pending >= 6)
      bulk::wait_written<6>();
    else if (pending >= 3)
      bulk::wait_written<3>();
    else if (pending >= 1)
      bulk::wait_written<1>();
    else
      bulk::wait_written<0>();
    bulk::proxy_fence();
    team_.sync();
  }

 private:
  const Team& team_;
  PlainWriter plain_;
  const int stage_bytes_;
  uint32_t put_ = 0;
};

}  // namespace jax_ep
