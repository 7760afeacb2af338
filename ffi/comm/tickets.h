// Tickets: numbers by which the coops of a rank divide work.
#pragma once

#include "comm/op.h"

namespace jax_ep {

// The tickets of one coop. It draws the next ticket before it works on the current one, which hides the latency.
// current() changes only in draw_ahead(). All lanes call together.
//
// kNumbers: &SignalPad::ticket or &SignalPad::push_ticket.
template <uint64_t SignalPad::* kNumbers>
class Tickets {
 public:
  // Without `draws` there is no ticket before the first draw_ahead().
  JAX_EP_FN explicit Tickets(Op& op, bool draws = true) : op_(op) {
    if (draws) draw_ahead();
  }

  JAX_EP_FN int current() const { return op_.coop.broadcast(static_cast<int>(issued_)); }
  JAX_EP_FN void draw_ahead() { issued_ = op_.coop.lane == 0 ? draw(&(op_.signal_pad->*kNumbers)) : 0; }

  // False if no ticket below `count` is left.
  JAX_EP_FN bool next(int count, int* ticket) {
    *ticket = current();
    if (*ticket >= count) return false;
    draw_ahead();
    return true;
  }

 private:
  Op& op_;
  uint64_t issued_ = 0;
};

// Calls visit(ticket) for this coop's tickets below `count`, until the coop sees the op fail.
template <class Visit>
JAX_EP_FN void for_each_ticket(Op& op, int count, Visit visit) {
  Tickets<&SignalPad::ticket> tickets(op);
  for (int ticket; op.ok() && tickets.next(count, &ticket);) visit(ticket);
}

}  // namespace jax_ep
