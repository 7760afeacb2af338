// combine: the expert's rank sums a token's rows in float32 and sends one row; the token's rank adds those and its own
// rows, in rank order.
#pragma once

#include "kernels/announcer.h"
#include "kernels/args.h"
#include "kernels/op.h"
#include "kernels/row_sum.h"
#include "kernels/schedule.h"

namespace jax_ep {

template <class T>
class Combine {
 public:
  JAX_EP_FN Combine(Op& op, const CombineArgs& args)
      : op_(op),
        args_(args),
        outputs_(reinterpret_cast<const T*>(args.outputs)),
        by_capacity_(args.capacity),
        rows_(op.team, in_words(args.outputs, args.landing, int64_t{args.hidden} * sizeof(T)) &&
                           in_words(args.combined, args.combined, 0)) {}

  // Sums the rows of every token of every peer, and sends the sums and the scalars home, chunk by chunk.
  JAX_EP_FN void push() {
    if (op_.team.pusher.index < 0) return;
    op_.enter(Phase::send);
    const int peers = op_.comm.size - 1, rows = peers * args_.num_tokens;
    const int parts = parts_of_a_row(rows, op_.team.pusher.count);
    const Schedule schedule(args_.num_tokens);
    Announcer announcer(op_, schedule, peers * parts);
    PushItems items(op_, rows * parts);
    for (int item = items.next(); item >= 0 && op_.may_push(); item = items.next()) {
      const int row = item / parts, part = item % parts, token = row / peers;
      const int home = (op_.comm.rank + 1 + row % peers) % op_.comm.size;
      if (args_.scalars && part == 0) push_scalars(home, token);
      if (push_partial(home, token, columns(part, parts)))
        announcer.begun(token, rows_);
      else
        announcer.skipped(token, rows_);
    }
    if (op_.may_push())
      rows_.finish();
    else
      rows_.drop();
    announcer.finish(rows_);
  }

  // For every token of this rank, the sum over ranks, as they arrive.
  JAX_EP_FN void reduce() {
    const Schedule schedule(args_.num_tokens, 1, op_.team.count);
    const int parts = parts_of_a_row(args_.num_tokens, op_.team.count), per_chunk = schedule.groups() * parts;
    for (uint64_t asked = op_.ask_for_ticket(); op_.ok();) {
      const int ticket = op_.take_ticket(asked);
      if (ticket >= schedule.chunks * per_chunk) return;
      asked = op_.ask_for_ticket();
      op_.wait_delivered(ticket / per_chunk);
      if (!op_.ok()) return;
      op_.enter(Phase::reduce);
      rows_.acquire();
      const Range tokens = schedule.group(ticket / per_chunk, ticket % per_chunk / parts);
      for (int token = tokens.begin; token < tokens.end; ++token) reduce(token, columns(ticket % parts, parts));
    }
  }

  JAX_EP_FN void complete() {
    rows_.finish();
    rows_.complete_to(rows_.mark());
  }

 private:
  // Few rows are cut into parts, so that all teams have work.
  JAX_EP_FN int parts_of_a_row(int rows, int teams) const {
    const int batches = (args_.hidden + kSumValues<T> - 1) / kSumValues<T>;
    return larger(1, smaller(batches, teams / larger(1, rows)));
  }
  JAX_EP_FN Range columns(int part, int parts) const {
    const Range batches = share((args_.hidden + kSumValues<T> - 1) / kSumValues<T>, part, parts);
    return {batches.begin * kSumValues<T>, smaller(batches.end * kSumValues<T>, args_.hidden)};
  }

  JAX_EP_FN int64_t table(int source, int token) const {
    return (int64_t{source} * args_.num_tokens + token) * args_.top_k;
  }

  // The k-th assignment of a token of `home`, if its row is here.
  JAX_EP_FN Term<const T> own_term(int home, int token, int k, int column) const {
    const int64_t at = table(home, token) + k;
    const int row = args_.rows[at];
    const float weight = args_.weights ? args_.weights[at] : 1.0f;  // asked for without waiting for the row
    return {row < 0 ? nullptr : outputs_ + int64_t{row} * args_.hidden + column, weight};
  }

  // The partial sum of a peer, if it sends one.
  JAX_EP_FN Term<const T> peer_term(int rank, int token, int column) const {
    const int32_t* targets = args_.targets + int64_t{token} * args_.top_k;
    bool sends = false;
    for (int k = 0; k < args_.top_k; ++k) {
      const int packed = targets[k];
      sends |= packed >= 0 && by_capacity_.quotient(packed) == rank;
    }
    return {sends ? landed(reinterpret_cast<const T*>(args_.landing), rank, token) + column : nullptr, 1.0f};
  }

  template <class Pointer>
  JAX_EP_FN Pointer* landed(Pointer* landing, int source, int token) const {
    return landing + (int64_t{source} * args_.num_tokens + token) * args_.hidden;
  }

  JAX_EP_FN auto place(T* row) const {
    return line_up<char>(op_.team, 1, [row](int) { return Term<char>{reinterpret_cast<char*>(row), 1.0f}; });
  }

  // Returns whether there is anything to push.
  JAX_EP_FN bool push_partial(int home, int token, Range columns) {
    const auto terms =
        line_up<const T>(op_.team, args_.top_k, [&](int k) { return own_term(home, token, k, columns.begin); });
    if (terms.empty()) return false;
    T* there = landed(static_cast<T*>(op_.mail_from(home)->buffers[0]), op_.comm.rank, token);
    rows_.sum(terms, place(there + columns.begin), columns.end - columns.begin);
    return true;
  }

  JAX_EP_FN void push_scalars(int home, int token) {
    float* there = static_cast<float*>(op_.mail_from(home)->buffers[1]) + int64_t{token} * args_.top_k;
    const int64_t at = table(home, token);
    for (int k = op_.team.lane; k < args_.top_k; k += Team::lanes)
      if (args_.rows[at + k] >= 0) there[k] = args_.scalars[at + k];
  }

  // Terms in rank order: a row of each peer, and in this rank's place its own rows.
  JAX_EP_FN void reduce(int token, Range columns) {
    const int me = op_.comm.rank, own_end = me + args_.top_k;
    const auto terms = line_up<const T>(op_.team, op_.comm.size - 1 + args_.top_k, [&](int i) {
      if (i >= me && i < own_end) return own_term(me, token, i - me, columns.begin);
      return peer_term(i < me ? i : i - args_.top_k + 1, token, columns.begin);
    });
    T* out = reinterpret_cast<T*>(args_.combined) + int64_t{token} * args_.hidden + columns.begin;
    const int width = columns.end - columns.begin;
    if (undelivered(token))
      fill_row(op_.team, reinterpret_cast<char*>(out), 0xff, int64_t{width} * sizeof(T));
    else
      rows_.sum(terms, place(out), width);
    if (columns.begin > 0) return;
    if (args_.scalars) push_scalars(me, token);
    return_nothing(token);
  }

  // Whether the dispatch of this token failed: then its sum is NaN, not zero.
  JAX_EP_FN bool undelivered(int token) const {
    return args_.top_k > 0 && args_.targets[int64_t{token} * args_.top_k] < -1;
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
  RowSum<T> rows_;
};

template <class T>
JAX_EP_FN void run_kernel(const Comm& comm, const CombineArgs& args, const Team& team) {
  Op op(comm, team, OpKind::combine);
  const int64_t row = int64_t{args.hidden} * sizeof(T);
  const Buffer results[] = {{args.combined, args.num_tokens * row},
                            {args.returned, args.returned ? int64_t{args.num_tokens} * args.top_k * 4 : 0}};
  op.poison(results);
  op.post(args.landing, args.returned);
  op.wait_posted();
  Combine<T> combine(op, args);
  combine.push();
  combine.reduce();
  combine.complete();
  op.finish(results);
}

}  // namespace jax_ep
