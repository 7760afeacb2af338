// The life of one op on one rank: begin, post, deliver, finish. Every kernel of this library is written over it.
#pragma once

#include "comm/result.h"
#include "comm/work_queue.h"

namespace jax_ep {

class Op : public WorkQueue {
 public:
  using WorkQueue::WorkQueue;

  // Sends every peer the addresses that it may write to. Every coop calls it; whoever wrote the rest of the mail has
  // met the elected coop before.
  JAX_EP_FN void post(const Posted& here) {
    record_begin(is_recorder());
    post_by(coop.index == 0, here);
  }
  // At least one coop of the rank is `elected`; to post twice does no harm.
  JAX_EP_FN void post_by(bool elected, const Posted& here) {
    coop.sync();
    if (!ok() || !elected) return;
    enter(Phase::post);
    each_peer([&](int peer) {
      for (int i = 0; i < kMailBuffers; ++i) mail(peer, comm.rank)->buffers[i] = as_seen_by(peer, here.buffers[i], i);
      store_release(&comm.heaps[peer]->posted[comm.rank], stamp_);
    });
  }

  // Begins this rank's entry in the flight recorder, by one coop that is `elected`. On a CPU that coop posts
  // afterwards; on a GPU another coop posts, in no order with it.
  JAX_EP_FN void record_begin(bool elected) const {
    if (ok() && elected && coop.lane == 0) begin_record();
  }
  // The elected one of a kernel on rows. On a GPU it is in the second CTA, for which nobody waits then.
  JAX_EP_FN bool is_recorder() const {
    return coop.index == (Coop::lanes == 1 ? 0 : smaller(2, coop.cta.count) * coop.member.count - 1);
  }

  // Leaves a report for the host, once per op. A report does not end the group, but the op delivers no results.
  JAX_EP_FN void report(Failure failure, int rank, int peer, int64_t expected, int64_t seen) const {
    record(heap, comm.report, {epoch, failure, kind_, rank, peer, expected, seen});
  }
  // Says at every peer that rows of this op will be missing, so that it delivers nothing either. Called after the peers
  // have posted, and before this rank delivers the chunk.
  JAX_EP_FN void refuse() const {
    if (!ok()) return;
    each_peer([&](int peer) { store_relaxed(&comm.heaps[peer]->refused, epoch); });
    coop.sync();
  }

  // Debug: fills the results with 0xFF, so that no stale value passes for a result. All coops meet, so all CTAs must
  // find an SM. `Results`: see kernels/op_spec.h.
  template <class Results>
  JAX_EP_FN void poison(const Results& results) {
    if (!comm.poison) return;
    enter(Phase::poison);
    fill(results, {coop.index, coop.count});
    barrier();
  }

  // Ends the op; every coop calls it. The last coop to come settles a failure: it returns only when no peer can write
  // into this rank's buffers any more. `coops`: how many call it, if not all do.
  template <class Results>
  JAX_EP_FN void finish(const Results& results, int coops = 0) {
    coop.sync();
    int last = 0;
    if (coop.lane == 0)
      last = fetch_add(&heap->exited, uint64_t{1}) == static_cast<uint64_t>(coops ? coops : coop.count) - 1;
    if (coop.broadcast(last)) finish_last(results);
    enter(Phase::none);
  }

 private:
  template <class T>
  friend class Window;
  friend class SentMail;
  friend class ReceivedMail;

  // The mailbox in which `source` leaves its mail at `rank` for this op: see window.h.
  JAX_EP_FN Mail* mail(int rank, int source) const { return &comm.heaps[rank]->mail[epoch & 1][source]; }

  // The address of a buffer of the mail, as a peer sees it.
  JAX_EP_FN void* as_seen_by(int peer, void* address, int buffer) const {
    const int64_t* peer_offsets = comm.peer_offsets[buffer];
    return static_cast<char*>(address) + (peer_offsets ? peer_offsets[peer] : 0);
  }

  JAX_EP_FN OpRecord* record_of_op() const { return &heap->ops[epoch % kRecordedOps]; }
  JAX_EP_FN bool has_record() const { return load_relaxed(&record_of_op()->epoch) == epoch; }
  JAX_EP_FN void begin_record() const { write_record(record_of_op(), epoch, comm.site, comm.signature); }

  template <class Results>
  JAX_EP_FN void finish_last(const Results& results) {
    coop.sync();  // what lane 0 has seen of the other coops, all lanes see
    const uint64_t refused_in = load_relaxed(&heap->refused), reported_in = load_relaxed(&heap->reported);
    const uint64_t now = clock_ns();
    const bool failed = load_acquire(&heap->abort) != 0;
    if (failed) {
      if (!has_told_failure(comm.report)) fail(Status::aborted, comm.rank, 0, 0);  // no coop of this rank has
      give_up();
    }
    const bool refused = refused_in == epoch;
    if (refused) report(Failure::invalid_routing, comm.rank, -1, 0, 0);  // unless there is a report of its own
    const bool undelivered = failed || refused || reported_in == epoch;
    if (failed && (reported_in == epoch || !is_earlier(ask_posted())) && !has_record()) begin_record();
    if (undelivered) fill(results, {0, 1});
    for (int source = 0; comm.poison && !failed && source < comm.size; ++source)
      fill_share(coop.lane, Buffer{mail(comm.rank, source), sizeof(Mail)}, {0, 1});
    if (coop.lane != 0) return;
    clear_counts(heap);
    if (!failed || has_record()) {  // else it never began
      OpRecord* const record = record_of_op();
      store_relaxed(&record->end_ns, failed ? clock_ns() : now);
      store_relaxed(&record->outcome, static_cast<uint64_t>(undelivered ? Outcome::failed : Outcome::delivered));
    }
    store_release(&heap->epoch, epoch);
  }

  // Raises the abort word everywhere, says that this rank writes no more, and waits until the peers say so too. A peer
  // that has not begun the op looks at its abort word first. A peer that has begun is waited for longer, as it may be
  // about to write here.
  JAX_EP_FN void give_up() {
    enter(Phase::give_up);
    const uint64_t culprit = load_relaxed(&heap->abort);
    each_peer([&](int peer) {
      compare_exchange(&comm.heaps[peer]->abort, uint64_t{0}, culprit);
      store_release(&comm.heaps[peer]->acknowledged[comm.rank], uint64_t{1});
    });
    if (is_earlier(ask_posted())) return coop.sync();  // nobody knows where this op's buffers are
    uint64_t spent = 0;
    each_peer([&](int peer) {
      const uint64_t grace = load_acquire(&heap->posted[peer]) >= first_stamp() ? kBegunGraceNs : kGraceNs;
      spent += spin_until(&heap->acknowledged[peer], 1, &heap->never, grace < spent ? 0 : grace - spent).ns;
    });
    coop.sync();
  }

  template <class Results>
  JAX_EP_FN void fill(const Results& results, Part part) const {
    results.each([&](const Buffer& result) { fill_share(coop.lane, result, part); });
    coop.sync();
  }
};

}  // namespace jax_ep
