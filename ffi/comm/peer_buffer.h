// One buffer of every peer, as it stands in the mail: each lane keeps that of one peer, where there are lanes enough.
#pragma once

#include "comm/op.h"

namespace jax_ep {

class PeerBuffer {
 public:
  // `index` in the mail, which must be here.
  JAX_EP_FN PeerBuffer(const Op& op, int index) : op_(op), index_(index), mine_(nullptr) {
    if (in_lanes() && op.team.lane < op.comm.size) mine_ = in_mail(op.team.lane);
  }

  // All lanes ask together, each for a rank of its own; null for a rank below zero.
  JAX_EP_FN char* of(int rank) const {
    if (!in_lanes()) return rank < 0 ? nullptr : in_mail(rank);
    char* buffer = op_.team.from_lane(mine_, larger(rank, 0));
    return rank < 0 ? nullptr : buffer;
  }

 private:
  JAX_EP_FN bool in_lanes() const { return Team::lanes > 1 && op_.comm.size <= Team::lanes; }
  JAX_EP_FN char* in_mail(int rank) const { return static_cast<char*>(op_.mail_from(rank)->buffers[index_]); }

  const Op& op_;
  const int index_;
  char* mine_;
};

}  // namespace jax_ep
