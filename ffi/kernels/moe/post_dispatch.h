// Who tells the peers of a dispatch where its buffers are: the last team of the last squad, so that nobody waits who
// routes; or one of the routers, if that squad finds no room while other kernels run. To post twice does no harm.
#pragma once

#include "comm/op.h"
#include "kernels/moe/args.h"

namespace jax_ep {

JAX_EP_FN void post_buffers(Op& op, const DispatchArgs& args, bool poster) {
  op.post_by(poster, args.received, args.rows, args.arrived, args.scales, args.landing);
}

// All teams call, before they route.
JAX_EP_FN void post_dispatch(Op& op, const DispatchArgs& args) {
  op.record_begin(op.is_recorder());
  post_buffers(op, args, op.team.index == (Team::lanes == 1 ? 0 : op.team.count - 1));
}

// For the routers: made when they have heard what the peers chose, and asked to post when they have counted that. By
// then it is known whether the last squad has posted.
class LatePost {
 public:
  // One team of the rank is `responsible`. A thread of the CPU has posted itself.
  JAX_EP_FN LatePost(const Op& op, bool responsible)
      : asked_(Team::lanes > 1 && responsible ? op.ask_posted() : ~uint64_t{0}) {}

  JAX_EP_FN void post_if_late(Op& op, const DispatchArgs& args) const { post_buffers(op, args, op.is_earlier(asked_)); }

 private:
  const uint64_t asked_;
};

}  // namespace jax_ep
