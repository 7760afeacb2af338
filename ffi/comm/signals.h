// Signals and waits of one op on one rank. Flags hold stamps (comm/heap.h), so nothing is reset between ops.
#pragma once

#include "comm/ctas.h"
#include "comm/heap.h"
#include "comm/integers.h"
#include "comm/notes_to_host.h"
#include "comm/timeline.h"

namespace jax_ep {

class Signals {
 public:
  JAX_EP_FN Signals(const Comm& comm, const Coop& coop, OpKind kind)
      : comm(comm),
        coop(coop),
        heap(comm.own_heap),
        epoch(load_relaxed(&heap->epoch) + 1),
        stamp_(epoch << kTagBits | comm.tag),
        kind_(kind),
        track_(find_track(heap, coop)),
        status_(load_relaxed(&heap->abort) ? Status::aborted : Status::ok) {}

  const Comm& comm;
  const Coop& coop;
  Heap* const heap;
  const uint64_t epoch;

  // False once this coop has seen the op fail. Then signals and waits do nothing.
  JAX_EP_FN bool ok() const { return status_ == Status::ok; }

  // Notes in the timeline that this coop begins `phase`.
  JAX_EP_FN void enter(Phase phase) const {
    if (track_) append(track_, epoch, kind_, phase);
  }

  // A flag for every source rank, in the heap of each rank.
  using Flags = uint64_t (Heap::*)[kMaxRanks];

  // Raises this rank's flag at every peer. One coop is `elected`; the coops that wrote what the flag stands for have
  // met it before.
  JAX_EP_FN void signal(Flags flags, bool elected) {
    coop.sync();
    if (!ok() || !elected) return;
    enter(Phase::post);
    each_peer([&](int peer) { store_release(&(comm.heaps[peer]->*flags)[comm.rank], stamp_); });
  }
  // Raises a flag in this rank's own heap, under the same conditions.
  JAX_EP_FN void signal_here(uint64_t* flag, bool elected) {
    if (ok() && elected && coop.lane == 0) store_release_here(flag, stamp_);
  }

  // Waits for the flags of all sources.
  JAX_EP_FN void wait(Flags flags) {
    wait_each(comm.size, [&](int peer) { return peer; }, [&](int peer) { return &(heap->*flags)[peer]; });
  }
  // Waits for a flag that this rank itself raises.
  JAX_EP_FN void wait_here(const uint64_t* flag) {
    wait_each(1, [&](int) { return comm.rank; }, [&](int) { return flag; });
  }
  // Waits until all peers have posted their buffers, which may be written from then on.
  JAX_EP_FN void wait_posted() { wait(&Heap::posted); }
  // Waits until a chunk is here, from one source or from all.
  JAX_EP_FN void wait_delivered(int source, int chunk) {
    wait_each(1, [&](int) { return source; }, [&](int) { return &heap->delivered[source][chunk]; });
  }
  JAX_EP_FN void wait_delivered(int chunk) {
    wait_each(comm.size, [&](int peer) { return peer; }, [&](int peer) { return &heap->delivered[peer][chunk]; });
  }
  // Waits for `count` chunks from number `first` on; the c-th chunk of a source has number source * chunks + c.
  JAX_EP_FN void wait_delivered_from(int first, int count, int chunks) {
    wait_each(
        count, [&](int i) { return (first + i) / chunks; },
        [&](int i) { return &heap->delivered[(first + i) / chunks][(first + i) % chunks]; });
  }

  // Whether a flag in this rank's heap is of this op.
  JAX_EP_FN bool is_raised(const uint64_t* flag) const { return load_acquire(flag) >= first_stamp(); }

  // Whether this rank has not posted yet. Two steps, as the comparison waits for the load.
  JAX_EP_FN uint64_t ask_posted() const { return load_relaxed(&heap->posted[comm.rank]); }
  JAX_EP_FN bool is_earlier(uint64_t seen) const { return seen < first_stamp(); }

  // Waits for all coops of the rank. Every coop calls it, even if its op has failed.
  JAX_EP_FN void barrier() {
    enter(Phase::barrier);
    meet(&heap->everyone, coop.cta.count);
  }
  // Waits for the coops of the first `ctas` CTAs, which alone call it.
  JAX_EP_FN void router_barrier(int ctas) {
    if (ctas == 1)
      coop.cta_sync();  // no other CTA takes part
    else
      meet(&heap->routers, ctas);
  }

 protected:
  // Calls visit(peer) for every rank, with a lane for each: so all visits take one turn, or two.
  template <class Visit>
  JAX_EP_FN void each_peer(Visit visit) const {
    JAX_EP_ROLLED
    for (int peer = coop.lane; peer < comm.size; peer += Coop::lanes) visit(peer);
  }

  // The least stamp of this op, whatever its tag. All stamps of later ops are greater.
  JAX_EP_FN uint64_t first_stamp() const { return epoch << kTagBits; }

  // Marks the op as failed for this coop and tells the host. Raises the abort word, unless the abort word was the
  // reason.
  JAX_EP_FN void fail(Status status, int peer, int64_t expected, int64_t seen) {
    if (status == Status::ok) return;
    status_ = status;
    record_failed_wait(heap, comm.report, status, {epoch, Failure::none, kind_, comm.rank, peer, expected, seen});
  }

  const uint64_t stamp_;
  const OpKind kind_;

 private:
  // A flag of this epoch with another tag was raised by a rank that runs another op, or this op with other shapes.
  JAX_EP_FN bool is_mismatch(uint64_t seen) const { return seen >> kTagBits == epoch && seen != stamp_; }

  JAX_EP_FN void meet(BarrierWords* words, int ctas) {
    // A coop that is late here may itself wait for a peer: it must be the first to give up, and to name the peer.
    const uint64_t timeout = comm.timeout_ns + kBarrierGraceNs;
    const Status status = cta_barrier(words, coop, ctas, ok(), &heap->abort, timeout);
    if (ok()) fail(status, comm.rank, 0, 0);
    coop.cta_sync();
    if (ok() && load_relaxed(&heap->abort))  // the coop that stood at the barrier for this one may have failed
      fail(Status::aborted, comm.rank, 0, 0);
  }

  // Waits for `count` flags of this op, with a lane for each. A flag of this rank itself gets the grace of meet().
  template <class PeerOf, class FlagOf>
  JAX_EP_FN void wait_each(int count, PeerOf peer_of, FlagOf flag_of) {
    if (ok()) enter(Phase::wait);
    for (int first = 0; first < count && ok(); first += Coop::lanes) {
      const int i = first + coop.lane;
      Status status = Status::ok;
      if (i < count) {
        const int peer = peer_of(i);
        const uint64_t timeout = comm.timeout_ns + (peer == comm.rank ? kBarrierGraceNs : 0);
        const Waited waited = spin_until(flag_of(i), first_stamp(), &heap->abort, timeout);
        status = waited.status == Status::ok && is_mismatch(waited.seen) ? Status::mismatch : waited.status;
        if (waited.ns) add_wait(&heap->waited_ns[peer], waited.ns);
        if (status == Status::timeout || status == Status::mismatch) fail(status, peer, stamp_, waited.seen);
      }
      if (!coop.ballot(status != Status::ok)) continue;
      if (coop.ballot(status != Status::ok && status != Status::aborted))
        status_ = Status::timeout;
      else
        fail(Status::aborted, comm.rank, 0, 0);
    }
    coop.sync();
  }

  static constexpr uint64_t kBarrierGraceNs = 200'000'000;
  Track* const track_;
  Status status_;
};

}  // namespace jax_ep
