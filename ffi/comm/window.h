// Access to a peer's memory. Only Op also writes there: flags and addresses in the peer's signal pad.
//
// A window is a buffer that a rank posts when an op begins. A peer may write and read the window after it has seen the
// post (Op::wait_posted), and until it delivers the last chunk that the rank waits for. Windows are numbered in the
// order of the op's spec. A rank may also write numbers to a peer's mailbox before it raises a flag at the peer.
#pragma once

#include "comm/op.h"

namespace jax_ep {

template <class T>
class Window {
 public:
  JAX_EP_FN Window(const Op& op, int number) : op_(op), number_(number) {}

  // The window of `rank`, which has posted. Loads from the mail.
  JAX_EP_FN T* peer(int rank) const { return static_cast<T*>(op_.mail(op_.comm.rank, rank)->buffers[number_]); }

 private:
  const Op& op_;
  const int number_;
};

// A window for hot loops: each lane keeps the address at one peer, if there are enough lanes. Construct it after
// Op::wait_posted().
template <class T>
class LaneWindow {
 public:
  JAX_EP_FN LaneWindow(const Op& op, int number) : op_(op), window_(op, number), mine_(nullptr) {
    if (in_lanes() && op.coop.lane < op.comm.size) mine_ = window_.peer(op.coop.lane);
  }

  // All lanes call together, each with its own rank. Null for a negative rank.
  JAX_EP_FN T* peer(int rank) const {
    if (!in_lanes()) return rank < 0 ? nullptr : window_.peer(rank);
    T* begin = op_.coop.from_lane(mine_, larger(rank, 0));
    return rank < 0 ? nullptr : begin;
  }

 private:
  JAX_EP_FN bool in_lanes() const { return Coop::lanes > 1 && op_.comm.size <= Coop::lanes; }

  const Op& op_;
  const Window<T> window_;
  T* mine_;
};

// Where this rank leaves numbers for every rank, kMailNumbers of each type, before it posts or signals.
class SentMail {
 public:
  JAX_EP_FN explicit SentMail(const Op& op) : op_(op) {}

  JAX_EP_FN int32_t* ints(int rank) const { return op_.mail(rank, op_.comm.rank)->ints; }
  JAX_EP_FN float* floats(int rank) const { return op_.mail(rank, op_.comm.rank)->floats; }

 private:
  const Op& op_;
};

// The sources' numbers. Read them after the wait for their flags.
class ReceivedMail {
 public:
  JAX_EP_FN explicit ReceivedMail(const Op& op) : boxes_(op.mail(op.comm.rank, 0)) {}

  JAX_EP_FN const int32_t* ints(int source) const { return boxes_[source].ints; }
  JAX_EP_FN const float* floats(int source) const { return boxes_[source].floats; }

 private:
  const Mail* boxes_;
};

}  // namespace jax_ep
