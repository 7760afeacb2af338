// One op on one rank: its life, its signals and its work. Every kernel that communicates with peers uses it.
//
// Op has no bases: with bases, nvcc 13.0 keeps a copy of the kernel's arguments in local memory, and a dispatch of
// float8 rows took 10 % longer (bench moe, 2 H100).
#pragma once

#include "comm/ctas.h"
#include "comm/integers.h"
#include "comm/reports.h"
#include "comm/result.h"
#include "comm/signal_pad.h"
#include "comm/timeline.h"

namespace jax_ep {

// How long a rank that gives up waits for peers to acknowledge that they write no more. A peer that has begun the op
// may be in the middle of a row, or its process may be off the GPU, so it gets longer. On a CPU no result depends on
// the wait: a process holds its results back until all its ranks have left the op (CpuGroup), and other processes write
// to staging.
constexpr uint64_t kGraceNs = kOnCpu ? 100'000'000 : 300'000'000, kBegunGraceNs = kOnCpu ? kGraceNs : 10'000'000'000;

class Op {
 public:
  JAX_EP_FN Op(const Comm& comm, const Coop& coop, OpKind kind)
      : comm(comm),
        coop(coop),
        signal_pad(comm.own_signal_pad),
        epoch(load_relaxed(&signal_pad->epoch) + 1),
        stamp_(epoch << kTagBits | comm.tag),
        kind_(kind),
        track_(find_track(signal_pad, coop)),
        status_(sees_abort() ? Status::aborted : Status::ok) {}

  const Comm& comm;
  const Coop& coop;
  SignalPad* const signal_pad;
  const uint64_t epoch;

  // False once this coop has seen the op fail. Then signals and waits do nothing.
  JAX_EP_FN bool ok() const { return status_ == Status::ok; }

  JAX_EP_FN void enter(Phase phase) const {
    if (track_) append(track_, epoch, kind_, phase);
  }

  // ---- Life: post, report, finish ----

  // Sends every rank the addresses to which it may write. Every coop calls. Coop 0 posts, after a barrier with the
  // coops that wrote the rest of the mail.
  JAX_EP_FN void post(const WindowAddresses& windows) {
    record_begin(is_recorder());
    post_by(coop.index == 0, windows);
  }
  // At least one coop of the rank is `elected`. Posting twice is harmless.
  JAX_EP_FN void post_by(bool elected, const WindowAddresses& windows) {
    coop.sync();
    if (!ok() || !elected) return;
    enter(Phase::post);
    each_rank([&](int rank) {
      for (int i = 0; i < kMailBuffers; ++i)
        mail(rank, comm.rank)->buffers[i] = as_seen_by(rank, windows.buffers[i], i);
      store_release(&comm.signal_pads[rank]->posted[comm.rank], stamp_);
    });
  }

  // One coop is `elected` and begins this op's record in the flight recorder.
  JAX_EP_FN void record_begin(bool elected) const {
    if (ok() && elected && coop.lane == 0) begin_record();
  }
  // Whether a kernel on rows elects this coop to begin the record. On a GPU it is the last coop of the second CTA, for
  // which no other coop waits at that time, or of the only CTA.
  JAX_EP_FN bool is_recorder() const {
    return coop.index == (Coop::lanes == 1 ? 0 : smaller(2, coop.cta.count) * coop.in_cta.count - 1);
  }

  // Each reports an error to the host, which keeps the first report of an op. The group remains usable. This op
  // delivers nothing.
  JAX_EP_FN void report_capacity(int rank, int64_t capacity, int64_t needed) const {
    leave_report(signal_pad, comm.report, {epoch, Failure::capacity, kind_, rank, rank, 0, capacity, needed});
  }
  JAX_EP_FN void report_invalid(int peer, int64_t detail, int64_t expected, int64_t seen) const {
    leave_report(signal_pad, comm.report, {epoch, Failure::invalid, kind_, comm.rank, peer, detail, expected, seen});
  }
  // Tells every rank that rows of this op will be missing, so that its results are undelivered. Call after
  // wait_posted(), and before this coop's last deliver().
  JAX_EP_FN void refuse() const {
    if (!ok()) return;
    each_rank([&](int rank) { store_relaxed(&comm.signal_pads[rank]->refused, epoch); });
    coop.sync();
  }

  // Debug: fills the results with 0xFF, so that no stale value passes for a result. All coops of `coop.cta` meet, so
  // each of these CTAs must find an SM. After join_op() they are the members. `Results`: see kernels/op_spec.h.
  template <class Results>
  JAX_EP_FN void poison(const Results& results) {
    if (!comm.poison) return;
    enter(Phase::poison);
    fill(results, {coop.index, coop.count});
    barrier();
  }

  // Ends the op. All coops call, or `coops` of them. If the op has failed, the last coop returns when every peer has
  // acknowledged that it writes no more here, or its grace is over.
  template <class Results>
  JAX_EP_FN void finish(const Results& results, int coops = 0) {
    coop.sync();
    int last = 0;
    if (coop.lane == 0)
      last = fetch_add(&signal_pad->exited, uint64_t{1}) == static_cast<uint64_t>(coops ? coops : coop.count) - 1;
    if (coop.broadcast(last)) finish_last(results);
    enter(Phase::none);
  }

  // ---- Signals and waits. Flags hold stamps (comm/signal_pad.h), so nothing is reset between ops ----

  // Flags in the signal pad of each rank, one for every source.
  using Flags = uint64_t (SignalPad::*)[kMaxRanks];

  // Raises this rank's flag at every rank. One coop is `elected`, after a barrier with the coops that wrote the data.
  JAX_EP_FN void signal(Flags flags, bool elected) {
    coop.sync();
    if (!ok() || !elected) return;
    enter(Phase::post);
    each_rank([&](int rank) { store_release(&(comm.signal_pads[rank]->*flags)[comm.rank], stamp_); });
  }
  // Raises a flag in this rank's own signal pad, under the same conditions.
  JAX_EP_FN void signal_here(uint64_t* flag, bool elected) {
    if (ok() && elected && coop.lane == 0) store_release_here(flag, stamp_);
  }

  JAX_EP_FN void wait(Flags flags) {
    wait_each(comm.size, [&](int source) { return source; }, [&](int source) { return &(signal_pad->*flags)[source]; });
  }
  JAX_EP_FN void wait_here(const uint64_t* flag) {
    wait_each(1, [&](int) { return comm.rank; }, [&](int) { return flag; });
  }
  // After this, the rank may write to the peers' buffers.
  JAX_EP_FN void wait_posted() { wait(&SignalPad::posted); }
  // Waits for a chunk from one source, or from all.
  JAX_EP_FN void wait_delivered(int source, int chunk) {
    wait_each(1, [&](int) { return source; }, [&](int) { return &signal_pad->delivered[source][chunk]; });
  }
  JAX_EP_FN void wait_delivered(int chunk) {
    wait_each(
        comm.size, [&](int source) { return source; },
        [&](int source) { return &signal_pad->delivered[source][chunk]; });
  }
  // Whether a chunk of a source is here. False if the source raised the flag for another op.
  JAX_EP_FN bool is_delivered(int source, int chunk) const {
    return load_acquire(&signal_pad->delivered[source][chunk]) == stamp_;
  }
  // How many of `chunks` chunks, from number `first` on, are here from all ranks. Looks at no more than there are lanes
  // for. Neither waits.
  JAX_EP_FN int count_delivered(int first, int chunks) const {
    const int looked = smaller(Coop::lanes / comm.size, chunks), chunk = coop.lane / comm.size;
    const bool missing = chunk < looked && !is_delivered(coop.lane % comm.size, first + chunk);
    const uint64_t lanes = coop.ballot(missing);
    coop.sync();
    return lanes ? lowest_bit(lanes) / comm.size : looked;
  }
  // Waits for `count` chunks from number `first` on. Chunk c of a source has the number source * chunks + c.
  JAX_EP_FN void wait_delivered_from(int first, int count, int chunks) {
    wait_each(
        count, [&](int i) { return (first + i) / chunks; },
        [&](int i) { return &signal_pad->delivered[(first + i) / chunks][(first + i) % chunks]; });
  }

  // Whether a flag in this rank's signal pad was raised in this op.
  JAX_EP_FN bool is_raised(const uint64_t* flag) const { return load_acquire(flag) >= first_stamp(); }

  // is_earlier(ask_posted()): whether this rank has not posted yet. The first call issues the load.
  JAX_EP_FN uint64_t ask_posted() const { return load_relaxed(&signal_pad->posted[comm.rank]); }
  JAX_EP_FN bool is_earlier(uint64_t seen) const { return seen < first_stamp(); }

  // Waits for all coops of the rank. Every coop calls, even if its op has failed.
  JAX_EP_FN void barrier() {
    enter(Phase::barrier);
    meet(&signal_pad->all_ctas, coop.cta.count);
  }
  // A barrier of the first `ctas` CTAs. Only their coops call.
  JAX_EP_FN void barrier_of_first(int ctas) {
    if (ctas == 1)
      coop.cta_sync();
    else
      meet(&signal_pad->first_ctas, ctas);
  }

  // ---- Work: counts say when a chunk is complete. Tickets (comm/tickets.h) number items ----

  // False once the group has failed. Call before every row, or every few rows: a peer that gives up waits until this
  // rank has ended the op, or for its grace. All lanes call.
  JAX_EP_FN bool may_push() const { return !take_abort(ask_abort()); }
  // ask_abort() loads the abort word, take_abort() tells all lanes whether lane 0 saw it raised. Lanes that disagree
  // would wait for each other forever.
  JAX_EP_FN uint64_t ask_abort() const { return ok() ? load_relaxed(&signal_pad->abort) : ~uint64_t{0}; }
  JAX_EP_FN bool take_abort(uint64_t issued) const { return coop.broadcast(issued != 0); }

  // Adds `pushed` to the count of `chunk`. The coop that brings the count to `whole` raises the chunk's flag at every
  // rank. All lanes call.
  JAX_EP_FN void deliver(int chunk, int pushed, int whole) {
    int last = 0;
    if (coop.lane == 0 && !ask_abort())  // rows may be missing once the group has failed
      last = pushed == whole || count_pushed(chunk, pushed, whole) == whole;
    if (!coop.broadcast(last)) return;
    coop.sync();
    each_rank([&](int rank) { store_release(&comm.signal_pads[rank]->delivered[comm.rank][chunk], stamp_); });
  }

  // Counts bytes of rows that came from a rank. One lane calls.
  JAX_EP_FN void count_received(int source, int64_t bytes) const {
    uint64_t* const counters = signal_pad->received_bytes[static_cast<unsigned>(coop.cta.index) % kCounters];
    if (source != comm.rank && bytes) atomic_add(&counters[source], static_cast<uint64_t>(bytes));
  }
  // The same for every source, if this coop is `elected`.
  template <class BytesFrom>
  JAX_EP_FN void count_received_by(bool elected, BytesFrom bytes_from) const {
    if (elected) each_rank([&](int source) { count_received(source, bytes_from(source)); });
  }

 private:
  template <class T>
  friend class Window;
  friend class SentMail;
  friend class ReceivedMail;

  // Calls visit(rank) for every rank, each on a lane of its own.
  template <class Visit>
  JAX_EP_FN void each_rank(Visit visit) const {
    JAX_EP_ROLLED
    for (int rank = coop.lane; rank < comm.size; rank += Coop::lanes) visit(rank);
  }

  // The least stamp of this op, for any tag. Stamps of later ops are greater.
  JAX_EP_FN uint64_t first_stamp() const { return epoch << kTagBits; }

  JAX_EP_FN bool sees_abort() const { return take_abort(load_relaxed(&signal_pad->abort)); }

  // Marks the op as failed for this coop, reports it to the host, and raises the abort word if nobody has.
  JAX_EP_FN void fail(Status status, int peer, int64_t expected, int64_t seen) {
    if (status == Status::ok) return;
    status_ = status;
    report_failed_wait(signal_pad, comm.report, status,
                       {epoch, Failure::none, kind_, comm.rank, peer, 0, expected, seen});
  }

  // A rank that runs another op, or this op with other shapes, raises the flag with another tag.
  JAX_EP_FN bool is_mismatch(uint64_t seen) const { return seen >> kTagBits == epoch && seen != stamp_; }

  JAX_EP_FN void meet(BarrierWords* words, int ctas) {
    // A late coop may be waiting for a peer. It must time out first, because its report names the peer.
    const uint64_t timeout = comm.timeout_ns + kBarrierGraceNs;
    const Status status = cta_barrier(words, coop, ctas, ok(), &signal_pad->abort, timeout);
    if (ok()) fail(status, comm.rank, 0, 0);
    coop.cta_sync();
    if (ok() && sees_abort())  // the coop that waited may have failed
      fail(Status::aborted, comm.rank, 0, 0);
  }

  // Waits for `count` flags, with a lane for each. A flag of this rank itself gets the grace of meet().
  template <class PeerOf, class FlagOf>
  JAX_EP_FN void wait_each(int count, PeerOf peer_of, FlagOf flag_of) {
    if (ok()) enter(Phase::wait);
    for (int first = 0; first < count && ok(); first += Coop::lanes) {
      const int i = first + coop.lane;
      Status status = Status::ok;
      if (i < count) {
        const int peer = peer_of(i);
        const uint64_t timeout = comm.timeout_ns + (peer == comm.rank ? kBarrierGraceNs : 0);
        const Waited waited = spin_until(flag_of(i), first_stamp(), &signal_pad->abort, timeout);
        status = waited.status == Status::ok && is_mismatch(waited.seen) ? Status::mismatch : waited.status;
        if (waited.ns) add_wait(&signal_pad->waited_ns[peer], waited.ns);
        if (status == Status::timeout || status == Status::mismatch) fail(status, peer, stamp_, waited.seen);
      }
      if (!coop.ballot(status != Status::ok)) continue;
      if (coop.ballot(status != Status::ok && status != Status::aborted))
        status_ = Status::failed;
      else
        fail(Status::aborted, comm.rank, 0, 0);
    }
    coop.sync();
  }

  // Adds `pushed` to the count of the chunk and returns the sum. Resets the count when the chunk is whole.
  JAX_EP_FN int count_pushed(int chunk, int pushed, int whole) {
    const int sum = static_cast<int>(fetch_add(&signal_pad->pushed[chunk], static_cast<uint64_t>(pushed))) + pushed;
    if (sum == whole) store_relaxed(&signal_pad->pushed[chunk], uint64_t{0});
    return sum;
  }

  JAX_EP_FN Mail* mail(int rank, int source) const { return &comm.signal_pads[rank]->mail[epoch & 1][source]; }

  JAX_EP_FN void* as_seen_by(int peer, void* address, int buffer) const {
    const int64_t* peer_offsets = comm.peer_offsets[buffer];
    return static_cast<char*>(address) + (peer_offsets ? peer_offsets[peer] : 0);
  }

  JAX_EP_FN OpRecord* record_of_op() const { return &signal_pad->ops[epoch % kRecordedOps]; }
  JAX_EP_FN bool has_record() const { return load_relaxed(&record_of_op()->epoch) == epoch; }
  JAX_EP_FN void begin_record() const { write_record(record_of_op(), epoch, comm.site, comm.signature); }

  template <class Results>
  JAX_EP_FN void finish_last(const Results& results) {
    coop.sync();  // all lanes see what lane 0 has seen of the other coops
    const uint64_t refused_in = load_relaxed(&signal_pad->refused), reported_in = load_relaxed(&signal_pad->reported);
    const uint64_t now = clock_ns();
    const bool failed = take_abort(load_acquire(&signal_pad->abort));
    if (failed) {
      if (!has_reported_failure(comm.report)) fail(Status::aborted, comm.rank, 0, 0);  // no coop of this rank has
      give_up();
    }
    const bool refused = refused_in == epoch;
    if (refused) report_invalid(comm.rank, kElsewhere, 0, 0);  // unless this rank has a report already
    const bool undelivered = failed || refused || reported_in == epoch;
    if (failed && (reported_in == epoch || !is_earlier(ask_posted())) && !has_record()) begin_record();
    if (undelivered) fill(results, {0, 1});
    for (int source = 0; comm.poison && !failed && source < comm.size; ++source)
      fill_part(coop.lane, Buffer{mail(comm.rank, source), sizeof(Mail)}, {0, 1});
    if (coop.lane != 0) return;
    clear_counts(signal_pad);
    if (!failed || has_record()) {  // else it never began
      OpRecord* const record = record_of_op();
      store_relaxed(&record->end_ns, failed ? clock_ns() : now);
      store_relaxed(&record->outcome, static_cast<uint64_t>(undelivered ? Outcome::failed : Outcome::delivered));
    }
    store_release(&signal_pad->epoch, epoch);
  }

  // Raises the abort word everywhere, acknowledges that this rank writes no more, and waits until no peer writes here
  // any more. A peer that has begun the op may be about to write, and gets a longer grace. Other peers see their abort
  // word first. A peer that has ended the op writes no more, and may never launch the next kernel, which would
  // acknowledge.
  JAX_EP_FN void give_up() {
    enter(Phase::give_up);
    const uint64_t culprit = load_relaxed(&signal_pad->abort);
    each_rank([&](int rank) {
      compare_exchange(&comm.signal_pads[rank]->abort, uint64_t{0}, culprit);
      store_release(&comm.signal_pads[rank]->acknowledged[comm.rank], uint64_t{1});
    });
    if (is_earlier(ask_posted())) return coop.sync();  // nobody knows where this op's buffers are
    uint64_t spent = 0;
    each_rank([&](int rank) {
      const uint64_t grace = load_acquire(&signal_pad->posted[rank]) >= first_stamp() ? kBegunGraceNs : kGraceNs;
      while (spent < grace && load_acquire(&comm.signal_pads[rank]->epoch) < epoch) {
        const uint64_t left = grace - spent, pause = left < kGraceLookNs ? left : kGraceLookNs;
        const Waited waited = spin_until(&signal_pad->acknowledged[rank], 1, &signal_pad->never, pause);
        spent += waited.ns;
        if (waited.status == Status::ok) break;
      }
    });
    coop.sync();
  }

  template <class Results>
  JAX_EP_FN void fill(const Results& results, Part part) const {
    results.each([&](const Buffer& result) { fill_part(coop.lane, result, part); });
    coop.sync();
  }

  static constexpr uint64_t kBarrierGraceNs = 200'000'000;
  static constexpr uint64_t kGraceLookNs = 1'000'000;  // between two reads of a peer's epoch
  const uint64_t stamp_;
  const OpKind kind_;
  Track* const track_;
  Status status_;
};

}  // namespace jax_ep
