// The values of a routing come back from the user, who may have changed them: those out of bounds are never followed.
#pragma once

#include <cstdint>

#include "comm/op.h"
#include "kernels/moe/args.h"

namespace jax_ep {

// Asked for every value of a leaf, in hot loops: it compares, and says what it found only when they are done.
class Bound {
 public:
  JAX_EP_FN Bound(RoutingLeaf leaf, int end) : leaf_(leaf), end_(end) {}  // at least 1

  // The value, or -1 where it is not below the end. Negative ones stand for none and stay as they are.
  JAX_EP_FN int place(int value) {
    if (value >= end_) found_ = value;
    return value < end_ ? value : -1;
  }
  // The value, or 0 where it is not in [0, end).
  JAX_EP_FN int count(int value) {
    const bool within = static_cast<uint32_t>(value) < static_cast<uint32_t>(end_);
    if (!within) found_ = value;
    return within ? value : 0;
  }

  // On this lane.
  JAX_EP_FN bool broken() const { return found_ != 0; }
  JAX_EP_FN void report(const Op& op) const {
    if (broken()) op.report(Failure::invalid_routing, op.comm.rank, static_cast<int>(leaf_), end_, found_);
  }
  // The same where peers wait for what this rank does not send: they deliver nothing either. All lanes call together,
  // when the peers have posted, and before this team delivers the last of its share.
  JAX_EP_FN void report_to_all(const Op& op) const {
    if (!op.team.ballot(broken())) return;
    report(op);
    op.refuse();
  }

 private:
  const RoutingLeaf leaf_;
  const int end_;
  int found_ = 0;  // is never out of bounds
};

}  // namespace jax_ep
