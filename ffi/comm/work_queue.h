// How the coops of a rank share an op's work: tickets hand out items, and counts say when a chunk is whole.
#pragma once

#include "comm/signals.h"

namespace jax_ep {

class WorkQueue : public Signals {
 public:
  using Signals::Signals;

  // ask_for_ticket() draws the rank's next number, on lane 0; take_ticket() gives it to all lanes. In two steps, so
  // that nobody waits for the memory.
  JAX_EP_FN uint64_t ask_for_ticket() { return ask_for(&heap->ticket); }
  JAX_EP_FN uint64_t ask_for_push_ticket() { return ask_for(&heap->push_ticket); }
  JAX_EP_FN int take_ticket(uint64_t asked) const { return coop.broadcast(static_cast<int>(asked)); }

  // False once the group has failed. Called before every row, as a peer that gave up must not be written to.
  JAX_EP_FN bool may_push() const { return !ask_abort(); }
  // Loads the abort word for later. Nothing may be pushed if it is not zero.
  JAX_EP_FN uint64_t ask_abort() const { return ok() ? load_relaxed(&heap->abort) : ~uint64_t{0}; }

  // Adds `share` to what is written of `chunk`. The coop that brings it to `whole` raises the chunk's flag at every
  // peer. All lanes call.
  JAX_EP_FN void deliver(int chunk, int share, int whole) {
    int last = 0;
    if (coop.lane == 0 && may_push())  // rows may be missing once the group has failed
      last = share == whole || count_pushed(chunk, share, whole) == whole;
    if (!coop.broadcast(last)) return;
    coop.sync();
    each_peer([&](int peer) { store_release(&comm.heaps[peer]->delivered[comm.rank][chunk], stamp_); });
  }

  // Counts bytes of rows that came from a rank. One lane calls.
  JAX_EP_FN void count_received(int source, int64_t bytes) const {
    uint64_t* const counters = heap->received_bytes[static_cast<unsigned>(coop.cta.index) % kCounters];
    if (source != comm.rank && bytes) atomic_add(&counters[source], static_cast<uint64_t>(bytes));
  }
  // Counts bytes_from(source) for every peer, if this coop is `elected`. Each byte is counted by one coop.
  template <class BytesFrom>
  JAX_EP_FN void count_received_by(bool elected, BytesFrom bytes_from) const {
    if (elected) each_peer([&](int source) { count_received(source, bytes_from(source)); });
  }

 private:
  JAX_EP_FN uint64_t ask_for(uint64_t* tickets) { return coop.lane == 0 ? draw(tickets) : 0; }

  // How much of the chunk is pushed, this share included. The counter is zero again when the chunk is whole.
  JAX_EP_FN int count_pushed(int chunk, int share, int whole) {
    const int pushed = static_cast<int>(fetch_add(&heap->pushed[chunk], static_cast<uint64_t>(share))) + share;
    if (pushed == whole) store_relaxed(&heap->pushed[chunk], uint64_t{0});
    return pushed;
  }
};

}  // namespace jax_ep
