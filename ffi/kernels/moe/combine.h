// combine: the expert's rank sums a token's rows in float32 and sends one row; the token's rank adds those and its own
// rows, in rank order.
#pragma once

#include "comm/op.h"
#include "comm/push.h"
#include "kernels/moe/args.h"
#include "kernels/moe/bound.h"
#include "kernels/moe/schedule.h"
#include "kernels/results.h"
#include "rows/row_sum.h"

namespace jax_ep {

// Long batches save instructions, but are slow to begin with, and idle where they do not fit the rows.
JAX_EP_CONSTANT_FN bool sums_long_batches(const CombineArgs& args) {
  const int row = args.hidden * (args.dtype == DType::float32 ? 4 : 2), lanes = Team::lanes * 16;
  const int even = even_pieces((row + lanes - 1) / lanes, kRowPieces);
  return args.num_tokens > kFewTokens && even > kLanePieces && 4 * even >= 3 * kRowPieces;
}

// `kPieces`: of a batch, that each lane has at most.
template <class T, int kPieces>
class Combine {
 public:
  JAX_EP_FN Combine(Op& op, const CombineArgs& args)
      : op_(op),
        args_(args),
        outputs_(reinterpret_cast<const T*>(args.outputs)),
        by_capacity_(args.capacity),
        row_bound_(RoutingLeaf::rows, args.capacity),
        target_bound_(RoutingLeaf::targets, op.comm.size * args.capacity),
        rows_(op.team,
              in_words(args.outputs, args.landing, int64_t{args.hidden} * sizeof(T)) &&
                  in_words(args.combined, args.combined, 0),
              kPieces > kLanePieces ? args.hidden : kSumValues<T>) {}  // short: as parts of a row are cut

  // Sums the rows of every token of every peer, and sends the sums and the scalars home, chunk by chunk.
  JAX_EP_FN void push() {
    if (op_.team.pusher.index < 0) return;
    op_.enter(Phase::send);
    const int peers = op_.comm.size - 1, rows = peers * args_.num_tokens;
    const int parts = parts_of_a_row(rows, op_.team.pusher.count);
    const Schedule schedule(args_.num_tokens);
    Announcer announcer(op_, schedule, peers * parts);
    PushItems items(op_, rows * parts, args_.num_tokens <= kFewTokens);
    const auto home_of = [&](int row) { return (op_.comm.rank + 1 + row % peers) % op_.comm.size; };
    // What an item needs to know is asked for while the one before it is summed.
    const auto ask = [&](int item) {
      return item < 0 ? Assigned{} : assigned(home_of(item / parts), item / parts / peers, op_.team.lane);
    };
    uint64_t raised = op_.ask_abort();
    int item = items.next();
    Assigned mine = ask(item);
    while (item >= 0 && !raised) {
      const int row = item / parts, part = item % parts, token = row / peers, home = home_of(row);
      const int next = items.next();
      const Assigned nexts = ask(next);
      raised = op_.ask_abort();
      if (args_.scalars && part == 0) push_scalars(home, token);
      if (push_partial(home, token, columns(part, parts), mine))
        announcer.begun(token, rows_);
      else
        announcer.skipped(token, rows_);
      item = next;
      mine = nexts;
    }
    if (!raised)
      rows_.finish();
    else
      rows_.drop();
    if (op_.team.ballot(row_bound_.broken())) wait_posted();
    row_bound_.report_to_all(op_);
    announcer.finish(rows_);
  }

  // For every token of this rank, the sum over ranks, as they arrive.
  JAX_EP_FN void reduce() {
    wait_posted();  // whoever has pushed nothing
    const Schedule schedule(args_.num_tokens, 1, op_.team.count);
    const int parts = parts_of_a_row(args_.num_tokens, op_.team.count), per_chunk = schedule.groups() * parts;
    int here = -1;  // the chunk that was waited for last
    for (uint64_t asked = op_.ask_for_ticket(); op_.ok();) {
      const int ticket = op_.take_ticket(asked);
      if (ticket >= schedule.chunks * per_chunk) return;
      asked = op_.ask_for_ticket();
      const Range tokens = schedule.group(ticket / per_chunk, ticket % per_chunk / parts);
      const Range part = columns(ticket % parts, parts);
      Known next = tokens.begin < tokens.end ? known(tokens.begin) : Known{};  // before the rows are waited for
      if (const int chunk = ticket / per_chunk; chunk != here) {
        op_.wait_delivered(chunk);
        if (!op_.ok()) return;
        op_.enter(Phase::reduce);
        rows_.acquire();
        here = chunk;
      }
      for (int token = tokens.begin; token < tokens.end; ++token) {
        const Known now = next;
        if (token + 1 < tokens.end) next = known(token + 1);  // before it is waited for
        reduce(token, part, now);
      }
    }
  }

  JAX_EP_FN void complete() {
    rows_.finish();
    rows_.complete_to(rows_.mark());
    count_received();
    row_bound_.report(op_);
    target_bound_.report(op_);
  }

 private:
  // Few rows are cut into parts, so that all teams have work.
  JAX_EP_FN int parts_of_a_row(int rows, int teams) const {
    const int batches = (args_.hidden + kSumValues<T> - 1) / kSumValues<T>;
    return larger(1, smaller(batches, teams / larger(1, rows)));
  }
  JAX_EP_FN Range columns(int part, int parts) const {
    if (parts == 1) return {0, args_.hidden};
    const Range batches = share((args_.hidden + kSumValues<T> - 1) / kSumValues<T>, part, parts);
    return {batches.begin * kSumValues<T>, smaller(batches.end * kSumValues<T>, args_.hidden)};
  }

  JAX_EP_FN int64_t table(int source, int token) const {
    return (int64_t{source} * args_.num_tokens + token) * args_.top_k;
  }

  // The k-th assignment of a token of `home`.
  struct Assigned {
    int row = -1;  // negative: not here
    float weight = 0;
  };
  JAX_EP_FN Assigned assigned(int home, int token, int k) const {
    if (k >= args_.top_k) return {};
    const int64_t at = table(home, token) + k;
    return {args_.rows[at], args_.weights ? args_.weights[at] : 1.0f};
  }
  JAX_EP_FN Term<const T> own_term(Assigned assigned, int column) {
    const int row = row_bound_.place(assigned.row);
    return {row < 0 ? nullptr : outputs_ + int64_t{row} * args_.hidden + column, assigned.weight};
  }

  template <class Pointer>
  JAX_EP_FN Pointer* landed(Pointer* landing, int source, int token) const {
    return landing + (int64_t{source} * args_.num_tokens + token) * args_.hidden;
  }

  JAX_EP_FN auto place(T* row) const {
    return line_up<char>(op_.team, 1, [row](int) { return Term<char>{reinterpret_cast<char*>(row), 1.0f}; });
  }

  // Returns whether there is anything to push.
  JAX_EP_FN bool push_partial(int home, int token, Range columns, Assigned mine) {
    const auto terms = line_up<const T>(op_.team, args_.top_k, [&](int k) {
      const bool known = k == op_.team.lane || op_.team.lane >= args_.top_k;
      return own_term(known ? mine : assigned(home, token, k), columns.begin);
    });
    if (terms.empty()) return false;
    const auto there = [&] {  // the first rows come while peers are waited for
      wait_posted();
      T* landing = op_.ok() ? static_cast<T*>(op_.mail_from(home)->buffers[0]) : nullptr;
      return place(landing ? landed(landing, op_.comm.rank, token) + columns.begin : nullptr);
    };
    rows_.sum_to(terms, there, columns.end - columns.begin);
    return true;
  }

  JAX_EP_FN void wait_posted() {
    if (posted_) return;
    op_.wait_posted();
    op_.enter(Phase::send);
    posted_ = true;
  }

  JAX_EP_FN void push_scalars(int home, int token) {
    wait_posted();
    if (!op_.ok()) return;
    float* there = static_cast<float*>(op_.mail_from(home)->buffers[1]) + int64_t{token} * args_.top_k;
    const int64_t at = table(home, token);
    for (int k = op_.team.lane; k < args_.top_k; k += Team::lanes)
      if (args_.rows[at + k] >= 0) there[k] = args_.scalars[at + k];
  }

  // What a lane knows of a token of this rank: the assignment in its place among the terms, and a target.
  struct Known {
    Assigned own;
    int target;
  };
  JAX_EP_FN Known known(int token) const {
    const int place = op_.team.lane - op_.comm.rank;
    return {place < 0 ? Assigned{} : assigned(op_.comm.rank, token, place), target_of(token, op_.team.lane)};
  }
  JAX_EP_FN int target_of(int token, int k) const {
    return k < args_.top_k ? args_.targets[int64_t{token} * args_.top_k + k] : -1;
  }

  // A bit for every rank that has a row of a token; `target` is that of this lane.
  JAX_EP_FN uint64_t senders_of(int token, int target) {
    uint64_t senders = 0;
    for (int first = 0; first < args_.top_k; first += Team::lanes) {
      if (first > 0) target = target_of(token, first + op_.team.lane);
      target = target_bound_.place(target);
      const int owner = target < 0 ? -1 : by_capacity_.quotient(target);
      for (int rank = 0; rank < op_.comm.size; ++rank)
        if (op_.team.ballot(owner == rank)) senders |= uint64_t{1} << rank;
    }
    return senders;
  }

  // Terms in rank order: a row of each peer that sends one, and in this rank's place its own rows.
  JAX_EP_FN void reduce(int token, Range columns, Known known) {
    const int me = op_.comm.rank, own_end = me + args_.top_k, count = op_.comm.size - 1 + args_.top_k;
    const uint64_t senders = senders_of(token, known.target);
    const T* landing = reinterpret_cast<const T*>(args_.landing);
    const auto terms = line_up<const T>(op_.team, count, [&](int i) -> Term<const T> {
      const bool mine = i == op_.team.lane || op_.team.lane >= count;
      if (i >= me && i < own_end) return own_term(mine ? known.own : assigned(me, token, i - me), columns.begin);
      const int rank = i < me ? i : i - args_.top_k + 1;
      return {senders >> rank & 1 ? landed(landing, rank, token) + columns.begin : nullptr, 1.0f};
    });
    T* out = reinterpret_cast<T*>(args_.combined) + int64_t{token} * args_.hidden + columns.begin;
    const int width = columns.end - columns.begin;
    note_received(senders, width * static_cast<int>(sizeof(T)));
    if (op_.team.broadcast(known.target) < -1)  // its dispatch failed: then its sum is NaN, not zero
      fill_row(op_.team, reinterpret_cast<char*>(out), 0xff, int64_t{width} * sizeof(T));
    else
      rows_.sum(terms, place(out), width);
    if (columns.begin > 0) return;
    if (args_.scalars) push_scalars(me, token);
    return_nothing(token);
  }

  // Each sender's part of a row has so many bytes. They are counted in the end: an atomic a row would hold up the sums.
  JAX_EP_FN void note_received(uint64_t senders, int bytes) {
    for (int i = 0; i < kRanksALane && i * Team::lanes < op_.comm.size; ++i)
      received_[i] += senders >> (i * Team::lanes + op_.team.lane) & 1 ? bytes : 0;
  }
  JAX_EP_FN void count_received() const {
    for (int i = 0; i < kRanksALane && i * Team::lanes < op_.comm.size; ++i)
      op_.count_received(i * Team::lanes + op_.team.lane, received_[i]);
  }

  // No rank sends a scalar for an assignment without a row.
  JAX_EP_FN void return_nothing(int token) {
    if (!args_.returned) return;
    const int64_t at = int64_t{token} * args_.top_k;
    for (int k = op_.team.lane; k < args_.top_k; k += Team::lanes)
      if (args_.targets[at + k] < 0) args_.returned[at + k] = 0.0f;
  }

  Op& op_;
  const CombineArgs& args_;
  const T* outputs_;
  const Divider by_capacity_;
  Bound row_bound_, target_bound_;
  bool posted_ = false;
  static constexpr int kRanksALane = kMaxRanks / Team::lanes;
  int64_t received_[kRanksALane] = {};  // bytes of rows from rank i * lanes + lane
  RowSum<T, kPieces> rows_;
};

template <class T, int kPieces = kLanePieces>
JAX_EP_FN void run_kernel(const Comm& comm, const CombineArgs& args, const Team& team) {
  Op op(comm, team, OpKind::combine);
  const Results<CombineArgs> results(args, comm.size);
  op.poison(results);
  op.post(args.landing, args.returned);
  Combine<T, kPieces> combine(op, args);
  combine.push();
  combine.reduce();
  combine.complete();
  op.finish(results);
}

template <class T>
JAX_EP_FN void run_kernel(const Comm& comm, const LongCombineArgs& args, const Team& team) {
  run_kernel<T, kRowPieces>(comm, static_cast<const CombineArgs&>(args), team);
}

}  // namespace jax_ep
