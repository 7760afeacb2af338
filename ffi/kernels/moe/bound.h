// The values of a routing come back from the user, who may have changed them: those out of bounds are never followed.
#pragma once

#include <cstdint>

#include "comm/op.h"
#include "kernels/moe/args.h"

namespace jax_ep {

// Every lane asks for every value that it follows, in hot loops; report() or report_to_all() says what was found when
// they are done.
class Bound {
 public:
  JAX_EP_FN Bound(RoutingLeaf leaf, int end) : leaf_(leaf), end_(end) {}  // at least 1

  // The value, or -1 where it is not below the end. Negative ones stand for none and stay as they are.
  JAX_EP_FN int index(int value) {
    if (value >= end_) found_ = value;
    return value < end_ ? value : -1;
  }
  // The value, or 0 where it is not in [0, end).
  JAX_EP_FN int count(int value) {
    const bool within = static_cast<uint32_t>(value) < static_cast<uint32_t>(end_);
    if (!within) found_ = value;
    return within ? value : 0;
  }

  // What was found is for others to report.
  JAX_EP_FN void forget() { found_ = 0; }
  // Whether this lane has found a value out of bounds.
  JAX_EP_FN bool broken() const { return found_ != 0; }
  JAX_EP_FN void report(const Op& op) const {
    if (broken()) op.report(Failure::invalid_routing, op.comm.rank, static_cast<int>(leaf_), end_, found_);
  }
  // All lanes call together, when the peers have posted, and before this coop delivers the last of its share. Reports,
  // and refuses at the peers, which wait for what this rank does not send: they deliver nothing either.
  JAX_EP_FN void report_to_all(const Op& op) const {
    if (!op.coop.ballot(broken())) return;
    report(op);
    op.refuse();
  }

 private:
  const RoutingLeaf leaf_;
  const int end_;
  int found_ = 0;  // is never out of bounds
};

}  // namespace jax_ep
