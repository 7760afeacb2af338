// Tells the peers of every chunk once this team's part of it is written: when the rows of the next are already on
// their way, so that the wire does not run dry.
#pragma once

#include "kernels/op.h"

namespace jax_ep {

class Announcer {
 public:
  JAX_EP_FN Announcer(Op& op, int chunks) : op_(op), chunks_(chunks) {}

  // A row of `chunk` was put. Chunks come in order; `rows` has mark and complete_to.
  template <class Rows>
  JAX_EP_FN void after(int chunk, Rows& rows) {
    if (announced_ < chunk) {
      rows.complete_to(written_);
      while (announced_ < chunk) op_.deliver(announced_++);
    }
    written_ = rows.mark();
  }

  // A row of `chunk` was begun, and with that the one begun before it was put.
  template <class Rows>
  JAX_EP_FN void begun(int chunk, Rows& rows) {
    after(begun_, rows);
    begun_ = chunk;
  }

  template <class Rows>
  JAX_EP_FN void finish(Rows& rows) {
    rows.complete_to(rows.mark());
    while (announced_ < chunks_) op_.deliver(announced_++);
  }

 private:
  Op& op_;
  const int chunks_;
  int announced_ = 0, written_ = 0, begun_ = 0;
};

}  // namespace jax_ep
