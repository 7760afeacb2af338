// combine: each rank that owns experts of a token sums the token's rows in float32, and sends one row to the token's
// source rank. The source rank adds the rows that come and its own rows, in rank order.
#pragma once

#include <variant>

#include "comm/integers.h"
#include "comm/op.h"
#include "comm/push.h"
#include "comm/tickets.h"
#include "comm/window.h"
#include "kernels/moe/args.h"
#include "kernels/moe/combine_groups.h"
#include "kernels/moe/rows.h"
#include "rows/row_sum.h"

namespace jax_ep {

template <class T>
class Combine {
 public:
  JAX_EP_FN Combine(Op& op, const CombineArgs& args)
      : op_(op),
        args_(args),
        outputs_(reinterpret_cast<const T*>(args.rows)),
        by_capacity_(args.capacity),
        row_bound_(RoutingLeaf::row_of, args.capacity),
        target_bound_(RoutingLeaf::targets, op.comm.size * args.capacity),
        rows_(op.coop, in_words(args.rows, args.landing, int64_t{args.hidden} * sizeof(T)) &&
                           in_words(args.combined, args.combined, 0)) {}

  // Sums this rank's rows of every peer's tokens, and sends the sums and the scalars to these peers, chunk by chunk.
  JAX_EP_FN void push() {
    const int peers = op_.comm.size - 1;
    if (op_.coop.sender.empty() || peers == 0) return;
    op_.enter(Phase::send);
    const int rows = peers * args_.num_tokens;
    const int splits = column_splits(rows, op_.coop.sender.count);
    const TokenSchedule schedule(args_.num_tokens);
    Announcer announcer(op_, schedule, peers * splits);
    PushItems items(op_, rows * splits, args_.num_tokens <= kFewTokens);
    int item = items.next();
    while (push_from(item, splits, items, announcer)) {
      item = items.next_stolen();
      if (item < 0) break;
    }
  }

  // Adds up the rows of all ranks for each token of this rank, as they arrive.
  JAX_EP_FN void reduce() {
    wait_posted();  // for coops that have pushed nothing
    const TokenSchedule schedule(args_.num_tokens, 1, op_.coop.count);
    const int splits = column_splits(args_.num_tokens, op_.coop.count), per_chunk = schedule.batches() * splits;
    int whole = 0;  // the chunks before this one are here
    for_each_ticket(op_, schedule.chunks * per_chunk, [&](int ticket) {
      const Range tokens = schedule.batch(ticket / per_chunk, ticket % per_chunk / splits);
      const Range range = columns(ticket % splits, splits);
      Known next = tokens.begin < tokens.end ? known(tokens.begin) : Known{};  // before the wait for rows
      if (const int chunk = ticket / per_chunk; chunk >= whole) {
        whole = chunk + await_chunks(op_, schedule, chunk);
        if (!op_.ok()) return;
        op_.enter(Phase::reduce);
        rows_.acquire();
      }
      for (int token = tokens.begin; token < tokens.end; ++token) {
        const Known now = next;
        if (token + 1 < tokens.end) next = known(token + 1);
        reduce(token, range, now);
      }
    });
  }

  JAX_EP_FN void complete() {
    rows_.finish();
    rows_.complete_to(rows_.puts());
    count_received();
    row_bound_.report(op_);
    target_bound_.report(op_);
  }

 private:
  // An item of a sender: some columns of the row that this rank sends to the source of a token. Items are ordered by
  // token, then source.
  struct Item {
    int source, token, split;
  };
  JAX_EP_FN Item item_at(int index, int splits) const {
    const int peers = op_.comm.size - 1, row = index / splits;
    return {(op_.comm.rank + 1 + row % peers) % op_.comm.size, row / peers, index % splits};
  }

  // Sends item `index`, unless it is negative, then all items of items.next(), and announces them. Returns false once
  // the group has failed.
  template <class Chunks>
  JAX_EP_FN bool push_from(int index, int splits, PushItems& items, Announcer<Chunks>& announcer) {
    const auto load = [&](int index) {
      if (index < 0) return Assigned{};
      const Item item = item_at(index, splits);
      return assigned(item.source, item.token, op_.coop.lane);
    };
    const auto visit = [&](int index, Assigned mine) {
      if (index < 0) return;
      const Item item = item_at(index, splits);
      push_item(item, columns(item.split, splits), mine, announcer, [&] { return items.was_stolen(index); });
    };
    const bool alive = look_ahead(op_, index, [&] { return items.next(); }, load, visit);
    if (alive)
      rows_.finish();
    else
      rows_.drop();
    if (op_.coop.ballot(row_bound_.broken())) wait_posted();
    row_bound_.report_to_all(op_);
    announcer.finish(rows_);
    return alive;
  }

  // If the item was stolen, the thief puts, announces and reports it.
  template <class Chunks, class WasStolen>
  JAX_EP_FN void push_item(const Item& item, Range columns, Assigned mine, Announcer<Chunks>& announcer,
                           WasStolen was_stolen) {
    const bool put =
        push_partial(item.source, item.token, columns, mine, was_stolen, [&] { announcer.after_part_of_begun(rows_); });
    if (was_stolen()) return row_bound_.forget();
    if (put)
      announcer.begun(item.token, rows_);
    else
      announcer.without_put(item.token);
    if (args_.scalars && item.split == 0) push_scalars(item.source, item.token);
  }

  // How many items the columns of a row are split into: several if rows are few, so that all coops have work.
  JAX_EP_FN int column_splits(int rows, int coops) const {
    const int batches = ceil_div(args_.hidden, kSumValues<T>);
    return larger(1, smaller(batches, coops / larger(1, rows)));
  }
  JAX_EP_FN Range columns(int split, int splits) const {
    if (splits == 1) return {0, args_.hidden};
    const Range batches = part_of(ceil_div(args_.hidden, kSumValues<T>), split, splits);
    return {batches.begin * kSumValues<T>, smaller(batches.end * kSumValues<T>, args_.hidden)};
  }

  JAX_EP_FN Assigned assigned(int source, int token, int k) const {
    return k < args_.top_k ? jax_ep::assigned(args_, source, token, k) : Assigned{};
  }
  JAX_EP_FN WeightedRow<const T> own_term(Assigned assigned, int column) {
    const int row = row_bound_.index(assigned.row);
    return {row < 0 ? nullptr : outputs_ + int64_t{row} * args_.hidden + column, assigned.weight};
  }

  JAX_EP_FN auto sink(T* row) const {
    return terms_of<char>(op_.coop, 1, [row](int) { return WeightedRow<char>{reinterpret_cast<char*>(row), 1.0f}; });
  }

  // Begins to sum this rank's rows of a token of `source` into the landing at `source`. Returns whether there are rows.
  // Calls was_stolen() once peers may be written to; a stolen item is not put. after_first(): see RowSum::sum_to.
  template <class WasStolen, class AfterFirst>
  JAX_EP_FN bool push_partial(int source, int token, Range columns, Assigned mine, WasStolen was_stolen,
                              AfterFirst after_first) {
    const auto terms = terms_of<const T>(op_.coop, args_.top_k, [&](int k) {
      const bool known = k == op_.coop.lane || op_.coop.lane >= args_.top_k;
      return own_term(known ? mine : assigned(source, token, k), columns.begin);
    });
    if (terms.empty()) return false;
    const auto there = [&] {  // the first rows come while peers are waited for
      wait_posted();
      T* landing = op_.ok() && !was_stolen() ? Window<T>(op_, kWindow<&CombineArgs::landing>).peer(source) : nullptr;
      return sink(landing ? landed(args_, landing, op_.comm.rank, token) + columns.begin : nullptr);
    };
    rows_.sum_to(terms, there, columns.end - columns.begin, /*cached=*/true, after_first);
    return true;
  }

  JAX_EP_FN void wait_posted() {
    if (peers_posted_) return;
    op_.wait_posted();
    op_.enter(Phase::send);
    peers_posted_ = true;
  }

  JAX_EP_FN void push_scalars(int source, int token) {
    wait_posted();
    if (!op_.ok()) return;
    float* there = Window<float>(op_, kWindow<&CombineArgs::returned>).peer(source) + int64_t{token} * args_.top_k;
    const int64_t at = entries_of(args_, source, token);
    for (int k = op_.coop.lane; k < args_.top_k; k += Coop::lanes)
      if (args_.row_of[at + k] >= 0) there[k] = args_.scalars[at + k];
  }

  // What a lane has loaded of a token of this rank: the assignment at the lane's position among the terms, and a
  // target.
  struct Known {
    Assigned own;
    int target;
  };
  JAX_EP_FN Known known(int token) const {
    const int position = op_.coop.lane - op_.comm.rank;
    return {position < 0 ? Assigned{} : assigned(op_.comm.rank, token, position), target_of(token, op_.coop.lane)};
  }
  JAX_EP_FN int target_of(int token, int k) const {
    return k < args_.top_k ? args_.targets[int64_t{token} * args_.top_k + k] : -1;
  }

  // A bit for every owner, a rank that has a row of a token. `target`: the token's target number `coop.lane`.
  JAX_EP_FN uint64_t owners_of(int token, int target) {
    uint64_t owners = 0;
    for (int first = 0; first < args_.top_k; first += Coop::lanes) {
      if (first > 0) target = target_of(token, first + op_.coop.lane);
      target = target_bound_.index(target);
      const int owner = target < 0 ? -1 : by_capacity_.quotient(target);
      for (int rank = 0; rank < op_.comm.size; ++rank)
        if (op_.coop.ballot(owner == rank)) owners |= uint64_t{1} << rank;
    }
    return owners;
  }

  // Adds terms in rank order: one row of each peer that sends one, and, in this rank's place, all of its own rows.
  JAX_EP_FN void reduce(int token, Range columns, Known known) {
    const int me = op_.comm.rank, own_end = me + args_.top_k, count = op_.comm.size - 1 + args_.top_k;
    const uint64_t owners = owners_of(token, known.target);
    const T* landing = reinterpret_cast<const T*>(args_.landing);
    const auto terms = terms_of<const T>(op_.coop, count, [&](int i) -> WeightedRow<const T> {
      const bool mine = i == op_.coop.lane || op_.coop.lane >= count;
      if (i >= me && i < own_end) return own_term(mine ? known.own : assigned(me, token, i - me), columns.begin);
      const int rank = i < me ? i : i - args_.top_k + 1;
      return {owners >> rank & 1 ? landed(args_, landing, rank, token) + columns.begin : nullptr, 1.0f};
    });
    T* out = reinterpret_cast<T*>(args_.combined) + int64_t{token} * args_.hidden + columns.begin;
    const int width = columns.end - columns.begin;
    note_received(owners, width * static_cast<int>(sizeof(T)));
    if (is_undelivered(op_.coop.broadcast(known.target)))
      fill_row(op_.coop, reinterpret_cast<char*>(out), 0xff, int64_t{width} * sizeof(T));
    else
      rows_.sum(terms, sink(out), width);
    if (columns.begin > 0) return;
    if (args_.scalars) push_scalars(me, token);
    return_nothing(token);
  }

  // Notes `bytes` for each owner. count_received() counts them at the end: an atomic for each row would delay the
  // sums.
  JAX_EP_FN void note_received(uint64_t owners, int bytes) {
    for (int i = 0; i < kRanksALane && i * Coop::lanes < op_.comm.size; ++i)
      received_[i] += owners >> (i * Coop::lanes + op_.coop.lane) & 1 ? bytes : 0;
  }
  JAX_EP_FN void count_received() const {
    for (int i = 0; i < kRanksALane && i * Coop::lanes < op_.comm.size; ++i)
      op_.count_received(i * Coop::lanes + op_.coop.lane, received_[i]);
  }

  // Zeroes the scalars of assignments without a row. No rank sends a scalar for them.
  JAX_EP_FN void return_nothing(int token) {
    if (!args_.returned) return;
    const int64_t at = int64_t{token} * args_.top_k;
    for (int k = op_.coop.lane; k < args_.top_k; k += Coop::lanes)
      if (args_.targets[at + k] < 0) args_.returned[at + k] = 0.0f;
  }

  Op& op_;
  const CombineArgs& args_;
  const T* outputs_;
  const Divider by_capacity_;
  Bound row_bound_, target_bound_;
  bool peers_posted_ = false;
  static constexpr int kRanksALane = kMaxRanks / Coop::lanes;
  int64_t received_[kRanksALane] = {};  // bytes of rows from rank i * lanes + lane
  RowSum<T> rows_;                      // in batches as columns() cuts rows
};

template <class T, class Kernel>
JAX_EP_FN void run_combine(const Comm& comm, const CombineArgs& args, const Coop& coop) {
  Op op(comm, coop, kind_of(args));
  const Results<CombineArgs> results(args, comm.size);
  op.poison(results);
  op.post(window_addresses(args, comm.size));
  Kernel combine(op, args);
  combine.push();
  combine.reduce();
  combine.complete();
  op.finish(results);
}
template <class T>
JAX_EP_FN void run_kernel(const Comm& comm, const CombineArgs& args, const Coop& coop) {
  run_combine<T, Combine<T>>(comm, args, coop);
}
template <class T>
JAX_EP_FN void run_kernel(const Comm& comm, const GroupedCombineArgs& args, const Coop& coop) {
  run_combine<T, CombineGroups<T>>(comm, args, coop);
}

// Short rows are always taken in groups. Long rows are only on few SMs, where each SM needs many loads in flight. Ranks
// may choose different kernels: what they send is the same.
inline std::variant<CombineArgs, GroupedCombineArgs> kernel_of(const CombineArgs& args, int ranks, int ctas) {
  constexpr int kFewCtas = 48;  // kernels_bench 2, kernels_bench 4
  const bool fits = fits_groups(args.num_tokens, args.top_k, combine_width(args, ranks));
  if (fits && (row_bytes(args) <= kShortRowBytes || ctas <= kFewCtas)) return GroupedCombineArgs{args};
  return args;
}

}  // namespace jax_ep
