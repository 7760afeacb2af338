// Who tells the peers of a dispatch where its buffers are: a team of the second squad, so that nobody waits who routes;
// or one of the first, if the second finds no room while other kernels run.
#pragma once

#include "kernels/args.h"
#include "kernels/op.h"

namespace jax_ep {

class DispatchPost {
 public:
  // Asks at once for the right to post, before the op looks at its heap: the answers come together.
  JAX_EP_FN DispatchPost(const Comm& comm, const Team& team)
      : first_(team.index == smaller(2, team.squad.count) * team.member.count - 1),
        late_(team.index == team.member.count - 1),
        asked_(first_ ? ask(team, comm.heaps[comm.rank]) : 0) {}

  // All teams call, before they route.
  JAX_EP_FN void post(Op& op, const DispatchArgs& args) const {
    if (first_) post(op, args, asked_);
  }
  // And those that route, when the peers have had time to hear of it.
  JAX_EP_FN void post_if_late(Op& op, const DispatchArgs& args) const {
    if (late_ && !op.has_posted()) post(op, args, ask(op.team, op.heap));
  }

 private:
  JAX_EP_FN static uint64_t ask(const Team& team, Heap* heap) { return team.lane == 0 ? draw(&heap->posters) : 0; }

  JAX_EP_FN void post(Op& op, const DispatchArgs& args, uint64_t asked) const {
    if (op.take_ticket(asked) == 0)
      op.post_by(op.team.index, args.received, args.rows, args.arrived, args.scales, args.landing);
  }

  const bool first_, late_;
  const uint64_t asked_;
};

}  // namespace jax_ep
