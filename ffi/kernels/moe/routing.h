// What the teams of a rank learn of the routing of a dispatch, which some of them work out (route.h, route_few.h).
#pragma once

#include "comm/op.h"
#include "comm/push.h"
#include "kernels/moe/args.h"
#include "kernels/moe/rows.h"
#include "kernels/moe/segments.h"

namespace jax_ep {

class Routing {
 public:
  JAX_EP_FN Routing(Op& op, const DispatchArgs& args) : op_(op), args_(args), segments_(op, args) {}

  // The rows of the local experts here, as soon as they are counted.
  JAX_EP_FN RowCounts counts() const {
    op_.wait_noted(&op_.heap->laid_out);
    const int local = args_.num_experts / op_.comm.size;
    if (!args_.few) return {args_.counts, op_.comm.size, local, segments_.end()};
    return {args_.scratch + totals_offset(args_.num_experts) + op_.comm.rank * local, 1, local, segments_.end()};
  }

  // Until this rank's assignments have their rows.
  JAX_EP_FN void await_places() const { op_.wait_noted(&op_.heap->placed[op_.comm.rank]); }

  // Until those of all ranks have; returns whether there is room for them. Of few tokens, each rank places all.
  JAX_EP_FN bool settled() const {
    await_places();
    if (!args_.few) op_.wait_told(&Heap::placed);
    return op_.ok() && segments_.check_capacity();
  }

 private:
  Op& op_;
  const DispatchArgs& args_;
  const Segments segments_;
};

// Hands out the tokens of a dispatch, those that are not early when they have their places.
class RoutedTokens {
 public:
  JAX_EP_FN RoutedTokens(Op& op, const DispatchArgs& args, const Routing& routing)
      : op_(op), routing_(routing), early_(args.early), items_(op, args.num_tokens) {}

  JAX_EP_FN int next() {
    const int token = items_.next();
    if (token >= early_ && !placed_) {
      routing_.await_places();
      op_.enter(Phase::send);
      placed_ = true;
    }
    return op_.ok() ? token : -1;
  }

 private:
  Op& op_;
  const Routing& routing_;
  const int early_;
  PushItems items_;
  bool placed_ = false;
};

}  // namespace jax_ep
