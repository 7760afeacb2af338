// Who tells the peers of a dispatch where its buffers are: the last team of the last squad, so that nobody waits who
// routes; or one of the first squad, if the last finds no room while other kernels run. To post twice does no harm.
#pragma once

#include "comm/op.h"
#include "kernels/moe/args.h"

namespace jax_ep {

class DispatchPost {
 public:
  JAX_EP_FN explicit DispatchPost(const Team& team)
      : first_(team.index == (Team::lanes == 1 ? 0 : team.count - 1)),
        late_(Team::lanes > 1 && team.squad.count > 1 && team.index == team.member.count - 1) {}

  // All teams call, before they route.
  JAX_EP_FN void post(Op& op, const DispatchArgs& args) const {
    op.record_begin(op.is_recorder());
    if (first_) send(op, args);
  }

  // Those that route ask when they have heard what the peers chose, and post when they have counted that: by then the
  // answer is there.
  JAX_EP_FN uint64_t ask(const Op& op) const { return late_ ? op.ask_posted() : ~uint64_t{0}; }
  JAX_EP_FN void post_if_late(Op& op, const DispatchArgs& args, uint64_t asked) const {
    if (late_ && op.is_earlier(asked)) send(op, args);
  }

 private:
  JAX_EP_FN static void send(Op& op, const DispatchArgs& args) {
    op.post_by(true, args.received, args.rows, args.arrived, args.scales, args.landing);
  }

  const bool first_, late_;
};

}  // namespace jax_ep
