// combine of many tokens: a coop takes tokens in groups (groups.h), and its lanes hold the rows of a whole group, so
// that short rows keep as many loads in flight as long rows do. The sums are those of combine.h, in the same order.
#pragma once

#include "comm/integers.h"
#include "comm/op.h"
#include "comm/push.h"
#include "comm/tickets.h"
#include "comm/window.h"
#include "kernels/moe/args.h"
#include "kernels/moe/groups.h"
#include "kernels/moe/rows.h"
#include "rows/row_sum.h"

namespace jax_ep {

// Whether to sum long batches. They save instructions, but start slowly, and waste lanes if they are not full. A row is
// cut into batches of one size, which must be at least three quarters of the largest. Tuned with `kernels_bench 2`.
JAX_EP_CONSTANT_FN bool sums_long_batches(const CombineArgs& args) {
  const int even = even_packs(ceil_div(static_cast<int>(row_bytes(args)), Coop::lanes * 16), kRowPacks);
  return even > kLanePacks && 4 * even >= 3 * kRowPacks;
}

// An assignment of a token to an expert here.
struct Assigned {
  int row = -1;  // negative: not here
  float weight = 0;
};

// Where a token's entries begin in the tables of a routing, [R, T, K].
JAX_EP_FN int64_t entries_of(const CombineArgs& args, int source, int token) {
  return (int64_t{source} * args.num_tokens + token) * args.top_k;
}
JAX_EP_FN Assigned assigned(const CombineArgs& args, int source, int token, int k) {
  const int64_t at = entries_of(args, source, token) + k;
  return {args.row_of[at], args.weights ? args.weights[at] : 1.0f};
}
// The partial sum of a token by `owner`, in a landing.
template <class T>
JAX_EP_FN T* landed(const CombineArgs& args, T* landing, int owner, int token) {
  return landing + (int64_t{owner} * args.num_tokens + token) * args.hidden;
}

template <class T>
class CombineGroups {
 public:
  JAX_EP_FN CombineGroups(Op& op, const CombineArgs& args)
      : op_(op),
        args_(args),
        outputs_(reinterpret_cast<const T*>(args.rows)),
        by_capacity_(args.capacity),
        row_bound_(RoutingLeaf::row_of, args.capacity),
        target_bound_(RoutingLeaf::targets, op.comm.size * args.capacity),
        rows_(op.coop,
              in_words(args.rows, args.landing, int64_t{args.hidden} * sizeof(T)) &&
                  in_words(args.combined, args.combined, 0),
              sums_long_batches(args) ? args.hidden : kSumValues<T>) {}

  // Sums this rank's rows of every peer's tokens, and sends the sums and the scalars to these peers, chunk by chunk.
  JAX_EP_FN void push() {
    const int peers = op_.comm.size - 1, top_k = args_.top_k, rows = peers * args_.num_tokens;
    if (op_.coop.sender.empty() || peers == 0) return;
    op_.enter(Phase::send);
    const TokenSchedule schedule(args_.num_tokens);
    Announcer announcer(op_, schedule, peers);
    PushItems items(op_, rows, /*own_first=*/false, group_items(rows, top_k, op_.coop.sender.count));
    // An item is a row that this rank may send. Items are ordered by token, then source.
    const auto source_of = [&](int item) { return (op_.comm.rank + 1 + item % peers) % op_.comm.size; };
    auto groups = groups_of(
        op_.coop, top_k, [&] { return items.next_range(); },
        [&](int item, int k) { return item < 0 ? Assigned{} : assigned(args_, source_of(item), item / peers, k); });
    op_.wait_posted();
    op_.enter(Phase::send);
    const LaneWindow<T> landings(op_, kWindow<&CombineArgs::landing>);
    const LaneWindow<float> returned(op_, kWindow<&CombineArgs::returned>);
    const auto announce = [&](Range done) {  // chunk by chunk
      for (int item = done.begin; item < done.end;) {
        const int token = item / peers, end = schedule.chunk(schedule.chunk_of(token)).end * peers;
        announcer.after(token, rows_, smaller(end, done.end) - item);
        item = end;
      }
    };
    Range summed{0, 0};
    uint64_t issued = op_.ask_abort();
    for (bool more = true; more;) {
      if (op_.take_abort(issued)) {
        rows_.drop();
        break;
      }
      const auto group = groups.next();
      groups.look_ahead();
      issued = op_.ask_abort();  // the load is hidden by the sums
      more = group.items.begin < group.items.end;
      const int item = group.items.begin + groups.item(), k = groups.position();
      const int source = item < group.items.end ? source_of(item) : -1, token = item / peers;
      const int row = row_bound_.index(group.mine.row);
      const auto terms = in_lanes(row < 0 ? nullptr : outputs_ + int64_t{row} * args_.hidden, group.mine.weight, top_k);
      // When the first batch of `summed` is put, the stores before it have had time to arrive, and peers wait for them.
      rows_.begin_sums(terms, args_.hidden, [&] { announcer.after_part(summed.begin / peers, rows_); });
      announce(summed);
      summed = group.items;
      T* const landing = landings.peer(source);
      const bool first = k == 0 && (terms.holders() & first_lanes(top_k) << op_.coop.lane);
      char* to = landing && first ? reinterpret_cast<char*>(landed(args_, landing, op_.comm.rank, token)) : nullptr;
      if (more) rows_.sums_to(terms, in_lanes(to, 1.0f, top_k), args_.hidden);
      if (!args_.scalars) continue;
      float* const scalars = returned.peer(source);
      if (scalars && row >= 0)
        scalars[int64_t{token} * top_k + k] = args_.scalars[entries_of(args_, source, token) + k];
    }
    row_bound_.report_to_all(op_);
    announcer.finish(rows_);
  }

  // Adds up the rows of all ranks for each token of this rank, as they arrive.
  JAX_EP_FN void reduce() {
    op_.wait_posted();  // for coops that have pushed nothing
    // A lane for each term of a token: a row of each peer and, in this rank's place, all of its own rows.
    const int me = op_.comm.rank, top_k = args_.top_k, width = combine_width(args_, op_.comm.size);
    const int at = op_.coop.lane % width, k = at - me, rank = at < me ? at : at - top_k + 1;
    const bool own = k >= 0 && k < top_k;
    const TokenSchedule schedule(args_.num_tokens, 1, op_.coop.count, Coop::lanes / width);
    const int batches = schedule.batches();
    Tickets<&SignalPad::ticket> tickets(op_);
    const auto claim = [&]() -> Range {
      if (!op_.ok()) return {0, 0};
      for (int ticket; tickets.next(schedule.chunks * batches, &ticket);) {
        const Range tokens = schedule.batch(ticket / batches, ticket % batches);
        if (tokens.begin < tokens.end) return tokens;  // the last chunk may have fewer batches
      }
      return {0, 0};
    };
    struct Known {
      Assigned own;
      int target = -1;
    };
    auto groups = groups_of(op_.coop, width, claim, [&](int token, int at) -> Known {
      const int k = at - me;
      if (token < 0 || k < 0 || k >= top_k) return {};
      return {assigned(args_, me, token, k), args_.targets[int64_t{token} * top_k + k]};
    });
    auto group = decltype(groups.next()){};
    int whole = 0;         // this coop need not look for chunks before this one
    bool missing = false;  // whether the chunk of `group` was not here at the last look
    for (;;) {
      if (!missing) {
        group = groups.next();
        groups.look_ahead();
      }
      const bool more = group.items.begin < group.items.end;
      if (const int chunk = schedule.chunk_of(group.items.begin); more && chunk >= whole) {
        // The code of the sums is long, so begin_sums() below is the only place that finishes them. If the chunk is
        // missing, this pass finishes the sums under way, and the next one waits.
        const int seen = await_chunks(op_, schedule, chunk, /*waits=*/missing);
        if (!op_.ok()) return rows_.drop();
        missing = seen == 0;
        whole = chunk + seen;
        op_.enter(Phase::reduce);
        rows_.acquire();
      }
      const int token = group.items.begin + groups.item();
      const bool here = token < group.items.end && !missing;
      const Lanes lanes = first_lanes(width) << (op_.coop.lane - at);  // those of the token
      const int target = target_bound_.index(group.mine.target);
      const int owner = target < 0 ? -1 : by_capacity_.quotient(target);
      const T* row = nullptr;
      for (int peer = 0; peer < op_.comm.size; ++peer) {
        const bool sends = static_cast<Lanes>(op_.coop.ballot(owner == peer)) & lanes;
        if (sends && !own && here && rank == peer)
          row = landed(args_, reinterpret_cast<const T*>(args_.landing), rank, token);
      }
      received_ += row ? 1 : 0;
      if (own && here) {
        const int mine = row_bound_.index(group.mine.own.row);
        row = mine < 0 ? nullptr : outputs_ + int64_t{mine} * args_.hidden;
      }
      const bool lost = static_cast<Lanes>(op_.coop.ballot(k == 0 && is_undelivered(group.mine.target))) & lanes;
      char* const out = args_.combined + int64_t{token} * args_.hidden * sizeof(T);
      const auto terms = in_lanes(lost ? nullptr : row, own ? group.mine.own.weight : 1.0f, width);
      rows_.begin_sums(terms, args_.hidden);
      if (!more) return;
      if (missing) continue;
      rows_.sums_to(terms, in_lanes(here && !lost && at == 0 ? out : nullptr, 1.0f, width), args_.hidden);
      for (uint64_t left = op_.coop.ballot(here && lost && at == 0); left; left &= left - 1)
        fill_row(op_.coop, op_.coop.from_lane(out, lowest_bit(left)), 0xff, int64_t{args_.hidden} * sizeof(T));
      if (args_.returned && own && here) {
        float& scalar = args_.returned[int64_t{token} * top_k + k];
        if (group.mine.target < 0)
          scalar = 0.0f;  // no rank sends one
        else if (args_.scalars && group.mine.own.row >= 0)
          scalar = args_.scalars[entries_of(args_, me, token) + k];
      }
    }
  }

  JAX_EP_FN void complete() {
    rows_.complete_to(rows_.puts());
    const int at = op_.coop.lane % combine_width(args_, op_.comm.size);
    for (int peer = 0; peer < op_.comm.size; ++peer) {
      const bool mine = at == (peer < op_.comm.rank ? peer : peer + args_.top_k - 1) && peer != op_.comm.rank;
      const int rows = op_.coop.sum(mine ? received_ : 0);
      if (op_.coop.lane == 0) op_.count_received(peer, int64_t{rows} * args_.hidden * sizeof(T));
    }
    row_bound_.report(op_);
    target_bound_.report(op_);
  }

 private:
  template <class Row>
  JAX_EP_FN LaneTerms<Row> in_lanes(Row* row, float weight, int stride) const {
    return {op_.coop, {row, weight}, static_cast<Lanes>(op_.coop.ballot(row != nullptr)), stride};
  }

  Op& op_;
  const CombineArgs& args_;
  const T* outputs_;
  const Divider by_capacity_;
  Bound row_bound_, target_bound_;
  int received_ = 0;  // rows of the rank whose rows this lane holds
  RowSum<T, kRowPacks, /*kSeveral=*/true> rows_;
};

}  // namespace jax_ep
