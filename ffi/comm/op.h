// The life of one op on one rank: begin, post, deliver, finish. Every kernel of this library is written over it.
#pragma once

#include "comm/ctas.h"
#include "comm/heap.h"
#include "comm/integers.h"
#include "comm/notes_to_host.h"
#include "comm/result.h"
#include "comm/timeline.h"

namespace jax_ep {

class Op {
 public:
  JAX_EP_FN Op(const Comm& comm, const Coop& coop, OpKind kind)
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

  JAX_EP_FN bool ok() const { return status_ == Status::ok; }

  // Notes in the timeline that this coop begins `phase`.
  JAX_EP_FN void enter(Phase phase) const {
    if (track_) append(track_, epoch, kind_, phase);
  }

  // Waits for all coops of the rank. Every coop calls it, even if its op has failed.
  JAX_EP_FN void barrier() {
    enter(Phase::barrier);
    meet(&heap->everyone, coop.cta.count);
  }
  // Waits for the coops of the first `ctas` CTAs, which alone call it.
  JAX_EP_FN void router_barrier(int ctas) {
    if (ctas == 1)
      coop.cta_sync();  // nobody else stands at it
    else
      meet(&heap->routers, ctas);
  }

  // Sends every peer the addresses that it may write to. Every coop calls it; whoever wrote the rest of the mail has
  // met the poster before.
  JAX_EP_FN void post(const Posted& here) {
    record_begin(is_recorder());
    post_by(coop.index == 0, here);
  }
  // At least one coop of the rank is a `poster`; to post twice does no harm.
  JAX_EP_FN void post_by(bool poster, const Posted& here) {
    coop.sync();
    if (!ok() || !poster) return;
    enter(Phase::post);
    each_peer([&](int peer) {
      for (int i = 0; i < kMailBuffers; ++i) mail(peer, comm.rank)->buffers[i] = as_seen_by(peer, here.buffers[i], i);
      store_release(&comm.heaps[peer]->posted[comm.rank], stamp_);
    });
  }

  // Begins this rank's entry in the flight recorder. One coop of the rank is the `recorder`. On a CPU it posts after
  // that; on a GPU another coop posts, in no order with this one.
  JAX_EP_FN void record_begin(bool recorder) const {
    if (ok() && recorder && coop.lane == 0) begin_record();
  }
  // Whether this coop is that one: on a GPU, in a kernel on rows, one of the second CTA, which nobody waits for then.
  JAX_EP_FN bool is_recorder() const {
    return coop.index == (Coop::lanes == 1 ? 0 : smaller(2, coop.cta.count) * coop.member.count - 1);
  }

  // Whether this rank's own posted flag is of an earlier op: in two steps, as a comparison waits for the load.
  JAX_EP_FN uint64_t ask_posted() const { return load_relaxed(&heap->posted[comm.rank]); }
  JAX_EP_FN bool is_earlier(uint64_t seen) const { return seen < first_stamp(); }

  // A flag for every source rank, in the heap of each rank.
  using Flags = uint64_t (Heap::*)[kMaxRanks];

  // Raises this rank's flag at every peer, when the coops that wrote what it stands for have met. One coop is the
  // `teller`.
  JAX_EP_FN void tell(Flags flags, bool teller) {
    coop.sync();
    if (!ok() || !teller) return;
    enter(Phase::post);
    each_peer([&](int peer) { store_release(&(comm.heaps[peer]->*flags)[comm.rank], stamp_); });
  }
  // Stores this op's stamp in a flag of this rank's own heap. The caller has met the coops that it speaks for.
  JAX_EP_FN void note(uint64_t* flag, bool teller) {
    if (ok() && teller && coop.lane == 0) store_release_here(flag, stamp_);
  }
  JAX_EP_FN void wait_noted(const uint64_t* flag) {
    wait_each(1, [&](int) { return comm.rank; }, [&](int) { return flag; });
  }
  JAX_EP_FN void wait_told(Flags flags) {
    wait_each(comm.size, [&](int peer) { return peer; }, [&](int peer) { return &(heap->*flags)[peer]; });
  }

  // Adds `share` to what is written of `chunk`; the coop that brings it to `whole` raises the chunk's flag at every
  // peer. All lanes call.
  JAX_EP_FN void deliver(int chunk, int share, int whole) {
    int last = 0;
    if (coop.lane == 0 && may_push())  // rows may be missing once the group has failed
      last = share == whole || count_pushed(chunk, share, whole) == whole;
    if (!coop.broadcast(last)) return;
    coop.sync();
    each_peer([&](int peer) { store_release(&comm.heaps[peer]->delivered[comm.rank][chunk], stamp_); });
  }

  JAX_EP_FN void wait_posted() { wait_told(&Heap::posted); }
  // Waits until a chunk is here, from one source or from all.
  JAX_EP_FN void wait_delivered(int source, int chunk) {
    wait_each(1, [&](int) { return source; }, [&](int) { return &heap->delivered[source][chunk]; });
  }
  // Waits for `count` chunks from number `first` on; the c-th chunk of a source has number source * chunks + c.
  JAX_EP_FN void wait_delivered_from(int first, int count, int chunks) {
    wait_each(
        count, [&](int i) { return (first + i) / chunks; },
        [&](int i) { return &heap->delivered[(first + i) / chunks][(first + i) % chunks]; });
  }
  JAX_EP_FN void wait_delivered(int chunk) {
    wait_each(comm.size, [&](int peer) { return peer; }, [&](int peer) { return &heap->delivered[peer][chunk]; });
  }

  // Whether a flag in this rank's signal pad is of this op.
  JAX_EP_FN bool is_raised(const uint64_t* flag) const { return load_acquire(flag) >= first_stamp(); }

  // ask_for_ticket() draws the rank's next number, on lane 0; take_ticket() gives it to all lanes. Two steps, so that
  // nobody waits for the memory.
  JAX_EP_FN uint64_t ask_for_ticket() { return ask_for(&heap->ticket); }
  JAX_EP_FN uint64_t ask_for_push_ticket() { return ask_for(&heap->push_ticket); }
  JAX_EP_FN int take_ticket(uint64_t asked) const { return coop.broadcast(static_cast<int>(asked)); }

  // False once the group has failed. Called before every row: a peer that gave up must not be written to.
  JAX_EP_FN bool may_push() const { return !ask_abort(); }
  // Loads the abort word for later; if it is not zero, nothing may be pushed.
  JAX_EP_FN uint64_t ask_abort() const { return ok() ? load_relaxed(&heap->abort) : ~uint64_t{0}; }

  // Counts bytes of rows that came from a rank. One lane calls.
  JAX_EP_FN void count_received(int source, int64_t bytes) const {
    uint64_t* const counters = heap->received_bytes[static_cast<unsigned>(coop.cta.index) % kCounters];
    if (source != comm.rank && bytes) atomic_add(&counters[source], static_cast<uint64_t>(bytes));
  }
  // Counts bytes_from(source) for every peer, if this coop is the `counter`. Each byte is counted by one coop.
  template <class BytesFrom>
  JAX_EP_FN void count_received_by(bool counter, BytesFrom bytes_from) const {
    if (counter) each_peer([&](int source) { count_received(source, bytes_from(source)); });
  }

  // Leaves a report for the host, once per op. A report does not end the group; the op then delivers no results.
  JAX_EP_FN void report(Failure failure, int rank, int peer, int64_t expected, int64_t seen) const {
    record(heap, comm.report, {epoch, failure, kind_, rank, peer, expected, seen});
  }
  // Tells every peer that rows of this op will be missing, so that it delivers nothing either. Called after the peers
  // have posted, and before this rank delivers the chunk.
  JAX_EP_FN void refuse() const {
    if (!ok()) return;
    each_peer([&](int peer) { store_relaxed(&comm.heaps[peer]->refused, epoch); });
    coop.sync();
  }

  // Debug: results start as 0xFF, so that no stale value passes for one. All coops meet, so all CTAs must find an
  // SM. Here and below they are Results of kernels/op_spec.h.
  template <class Results>
  JAX_EP_FN void poison(const Results& results) {
    if (!comm.poison) return;
    enter(Phase::poison);
    fill(results, {coop.index, coop.count});
    barrier();
  }

  // Ends the op; every coop must call it. The last coop to come settles a failure: it returns only when no peer can
  // write into this rank's buffers any more. `coops`: how many call it, if some do nothing else.
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

  template <class Visit>  // calls visit(peer) for every rank: a lane each, so there is a turn or two
  JAX_EP_FN void each_peer(Visit visit) const {
    JAX_EP_ROLLED
    for (int peer = coop.lane; peer < comm.size; peer += Coop::lanes) visit(peer);
  }

  // The box in which `source` leaves its mail at `rank` for this op: see window.h.
  JAX_EP_FN Mail* mail(int rank, int source) const { return &comm.heaps[rank]->mail[epoch & 1][source]; }

  template <class Results>
  JAX_EP_FN void finish_last(const Results& results) {
    coop.sync();  // what lane 0 has seen of the other coops, all lanes see
    const uint64_t refused_in = load_relaxed(&heap->refused), reported_in = load_relaxed(&heap->reported);
    const uint64_t now = clock_ns();
    const bool failed = load_acquire(&heap->abort) != 0;
    if (failed) {
      if (!has_told_failure(comm.report))
        settle(Status::aborted, comm.rank, 0, 0);  // no coop of this rank has told the host
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

  // The least stamp of this op, whatever it is called with; a later op's is more. A flag that is of this epoch, but of
  // another tag, was raised by a rank that runs another op, or the op with other shapes.
  JAX_EP_FN uint64_t first_stamp() const { return epoch << kTagBits; }
  JAX_EP_FN bool is_mismatch(uint64_t seen) const { return seen >> kTagBits == epoch && seen != stamp_; }

  // The address of a buffer of the mail, as a peer sees it.
  JAX_EP_FN void* as_seen_by(int peer, void* address, int buffer) const {
    const int64_t* peer_offsets = comm.peer_offsets[buffer];
    return static_cast<char*>(address) + (peer_offsets ? peer_offsets[peer] : 0);
  }

  JAX_EP_FN OpRecord* record_of_op() const { return &heap->ops[epoch % kRecordedOps]; }
  JAX_EP_FN bool has_record() const { return load_relaxed(&record_of_op()->epoch) == epoch; }
  JAX_EP_FN void begin_record() const { write_record(record_of_op(), epoch, comm.site, comm.signature); }

  // How much of the chunk is pushed, this share included; the counter is zero again when it is whole.
  JAX_EP_FN int count_pushed(int chunk, int share, int whole) {
    const int pushed = static_cast<int>(fetch_add(&heap->pushed[chunk], static_cast<uint64_t>(share))) + share;
    if (pushed == whole) store_relaxed(&heap->pushed[chunk], uint64_t{0});
    return pushed;
  }

  JAX_EP_FN uint64_t ask_for(uint64_t* tickets) { return coop.lane == 0 ? draw(tickets) : 0; }

  JAX_EP_FN void meet(BarrierWords* words, int ctas) {
    // A coop that is late here may itself wait for a peer: it must be the first to give up, and to name the peer.
    const uint64_t timeout = comm.timeout_ns + kBarrierGraceNs;
    const Status status = cta_barrier(words, coop, ctas, ok(), &heap->abort, timeout);
    if (ok()) settle(status, comm.rank, 0, 0);
    coop.cta_sync();
    if (ok() && load_relaxed(&heap->abort))  // the coop that stood at the barrier for this one may have failed
      settle(Status::aborted, comm.rank, 0, 0);
  }

  // Waits for `count` flags of this op, a lane each. A flag of this rank itself gets longer, for the reason in meet().
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
        if (status == Status::timeout || status == Status::mismatch) settle(status, peer, stamp_, waited.seen);
      }
      if (!coop.ballot(status != Status::ok)) continue;
      if (coop.ballot(status != Status::ok && status != Status::aborted))
        status_ = Status::timeout;
      else
        settle(Status::aborted, comm.rank, 0, 0);
    }
    coop.sync();
  }

  // Marks the op as failed for this coop, tells the host, and raises the abort word unless it was the reason.
  JAX_EP_FN void settle(Status status, int peer, int64_t expected, int64_t seen) {
    if (status == Status::ok) return;
    status_ = status;
    record_failed_wait(heap, comm.report, status, {epoch, Failure::none, kind_, comm.rank, peer, expected, seen});
  }

  // Raises the abort word everywhere, says that this rank writes no more, and waits until the peers say so too.
  // A peer that has not begun looks at its abort word first; one that has is waited for longer, as it may be about to
  // write here.
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

  static constexpr uint64_t kBarrierGraceNs = 200'000'000;
  const uint64_t stamp_;
  const OpKind kind_;
  Track* const track_;
  Status status_;
};

}  // namespace jax_ep
