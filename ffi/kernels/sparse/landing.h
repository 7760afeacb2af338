// Where an owner takes in what the other holders of its rows add to them. Each holder has some room at each owner,
// which it fills in no order; what finds no room stays with the holder, where the owner fetches it.
#pragma once

#include "comm/op.h"
#include "kernels/sparse/args.h"

namespace jax_ep {

class SparseLanding {
 public:
  JAX_EP_FN SparseLanding(const Op& op, const SparseReduceArgs& args, int64_t row_bytes)
      : op_(op), args_(args), row_bytes_(row_bytes), room_(args.landing_room) {}

  JAX_EP_FN bool has_room() const { return room_ > 0; }

  // Before the peers may write; with a barrier behind it.
  JAX_EP_FN void clear() const {
    if (!op_.ok() || !has_room()) return;
    auto* places = reinterpret_cast<int32_t*>(args_.landing);
    const int64_t all = int64_t{op_.comm.size} * args_.slots_kept, step = op_.team.count * Team::lanes;
    for (int64_t i = op_.team.index * Team::lanes + op_.team.lane; i < all; i += step) places[i] = -1;
    if (op_.team.index == 0)
      for (int rank = op_.team.lane; rank < op_.comm.size; rank += Team::lanes) args_.sent[rank] = 0;
  }

  // Where this rank may put its part of a row at the owner, or null. All lanes ask together.
  JAX_EP_FN char* claim(int owner, int slot) const {
    int place = 0;
    if (op_.team.lane == 0) place = atomic_add(&args_.sent[owner], 1);
    place = op_.team.broadcast(place);
    if (place >= room_) return nullptr;
    char* landing = static_cast<char*>(op_.mail_from(owner)->buffers[3]);
    if (op_.team.lane == 0) *place_of(landing, op_.comm.rank, slot) = place;
    return row(landing, owner, op_.comm.rank, place);
  }

  // The part of another holder, if it is here, when all have delivered theirs.
  JAX_EP_FN const char* find(int holder, int slot) const {
    if (!has_room()) return nullptr;
    const int place = *place_of(args_.landing, holder, slot);
    return place < 0 ? nullptr : row(args_.landing, op_.comm.rank, holder, place);
  }

 private:
  JAX_EP_FN int32_t* place_of(char* landing, int holder, int slot) const {
    return reinterpret_cast<int32_t*>(landing) + int64_t{holder} * args_.slots_kept + slot;
  }
  JAX_EP_FN char* row(char* landing, int owner, int holder, int place) const {
    const int region = (holder - owner - 1 + op_.comm.size) % op_.comm.size;
    return landing + landing_places_bytes(op_.comm.size, args_.slots_kept) +
           (int64_t{region} * room_ + place) * row_bytes_;
  }

  const Op& op_;
  const SparseReduceArgs& args_;
  const int64_t row_bytes_;
  const int room_;
};

}  // namespace jax_ep
