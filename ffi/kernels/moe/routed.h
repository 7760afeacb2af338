// What the coops of a rank learn of the routing of a dispatch, which some of them work out (route.h, route_few.h), and
// how peers learn where its buffers are.
#pragma once

#include "comm/op.h"
#include "comm/push.h"
#include "kernels/moe/args.h"
#include "kernels/moe/rows.h"
#include "kernels/moe/segments.h"

namespace jax_ep {

class Routed {
 public:
  JAX_EP_FN Routed(Op& op, const DispatchArgs& args) : op_(op), args_(args), segments_(op, args) {}

  // Waits until the rows of the local experts are counted, and returns the counts.
  JAX_EP_FN RowCounts counts() const {
    op_.wait_noted(&op_.heap->laid_out);
    return segments_.counts();
  }

  // Waits until this rank's assignments have their rows.
  JAX_EP_FN void await_placed() const { op_.wait_noted(&op_.heap->placed[op_.comm.rank]); }

  // Waits until the assignments of all ranks have their rows, and returns whether there is room for them. If tokens are
  // few, each rank places all.
  JAX_EP_FN bool settled() const {
    await_placed();
    if (!args_.few) op_.wait_told(&Heap::placed);
    return op_.ok() && segments_.check_capacity();
  }

 private:
  Op& op_;
  const DispatchArgs& args_;
  const Segments segments_;
};

// Hands out the tokens of a dispatch, one that is not eager only when it has its rows; none once the op has failed.
class RoutedTokens {
 public:
  JAX_EP_FN RoutedTokens(Op& op, const DispatchArgs& args, const Routed& routed)
      : op_(op), routed_(routed), eager_(args.eager), items_(op, args.num_tokens) {}

  JAX_EP_FN int next() {
    const int token = items_.next();
    if (token >= eager_ && !placed_) {
      routed_.await_placed();
      op_.enter(Phase::send);
      placed_ = true;
    }
    return op_.ok() ? token : -1;
  }
  JAX_EP_FN int next_abandoned() const { return -1; }  // all go by ticket

 private:
  Op& op_;
  const Routed& routed_;
  const int eager_;
  PushItems items_;
  bool placed_ = false;
};

// Who tells the peers where the buffers of a dispatch are: the last coop of the last CTA, so that nobody waits who
// routes; or one of the routers, if that CTA finds no SM while other kernels run. To post twice does no harm.
JAX_EP_FN void post_buffers(Op& op, const DispatchArgs& args, bool poster) {
  op.post_by(poster, posted(args, op.comm.size));
}

// All coops call, before they route.
JAX_EP_FN void post_dispatch(Op& op, const DispatchArgs& args) {
  op.record_begin(op.is_recorder());
  post_buffers(op, args, op.coop.index == (Coop::lanes == 1 ? 0 : op.coop.count - 1));
}

// For the routers: made when they have heard what the peers chose, and asked to post when they have counted that. By
// then it is known whether the last CTA has posted.
class LatePost {
 public:
  // One coop of the rank is `responsible`. A thread of the CPU has posted itself.
  JAX_EP_FN LatePost(const Op& op, bool responsible)
      : asked_(Coop::lanes > 1 && responsible ? op.ask_posted() : ~uint64_t{0}) {}

  JAX_EP_FN void post_if_late(Op& op, const DispatchArgs& args) const { post_buffers(op, args, op.is_earlier(asked_)); }

 private:
  const uint64_t asked_;
};

}  // namespace jax_ep
