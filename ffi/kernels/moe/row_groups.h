// Moves short rows along a routing in groups of tokens (groups.h), by the schedule of rows.h.
#pragma once

#include "comm/integers.h"
#include "comm/op.h"
#include "comm/push.h"
#include "comm/tickets.h"
#include "kernels/moe/groups.h"
#include "kernels/moe/rows.h"
#include "rows/movers.h"

namespace jax_ep {

// The tokens of `items`, one by one, and an address for each of a token's `top_k` assignments: resolve(token, k,
// packed) of what load(token, k) has loaded, or null. What is known of a group is loaded while the group before is
// under way, and resolved by all lanes at once. All lanes call.
template <class Items, class Load, class Resolve>
class GroupedTokens {
 public:
  JAX_EP_FN GroupedTokens(const Op& op, Items& items, int top_k, Load load, Resolve resolve)
      : op_(op),
        resolve_(resolve),
        top_k_(top_k),
        groups_(op.coop, top_k, Claim{&items}, load),
        issued_(op.ask_abort()) {}

  // The next token with an address, or -1 if there is none or the group of ranks has failed. Calls skipped(token) for a
  // token without addresses.
  template <class Skipped>
  JAX_EP_FN int next(Skipped skipped) {
    for (;;) {
      if (token_ == tokens_.end && !next_group()) return -1;
      first_lane_ = (token_ - tokens_.begin) * top_k_;
      const int token = token_++;
      // At half of the group, because the claim waits for the rows of tokens that are not eager.
      if (token == (tokens_.begin + tokens_.end) / 2) groups_.look_ahead();
      if (holders_ >> first_lane_ & first_lanes(top_k_)) return token;
      skipped(token);
    }
  }

  // The k-th address of the token that next() returned last.
  JAX_EP_FN char* address(int k) const {
    char* const found = op_.coop.from_lane(mine_, (first_lane_ + k) % Coop::lanes);
    return k < top_k_ ? found : nullptr;
  }

 private:
  struct Claim {
    Items* items;
    JAX_EP_FN Range operator()() const { return items->next_range(); }
  };

  // Looks at the abort word as it was when the group before began, which hides the latency of the load.
  JAX_EP_FN bool next_group() {
    const auto group = groups_.next();
    const bool failed = op_.take_abort(issued_);
    issued_ = op_.ask_abort();
    const bool more = !failed && op_.ok() && group.items.begin < group.items.end;
    tokens_ = more ? group.items : Range{0, 0};
    token_ = tokens_.begin;
    if (!more) return false;
    mine_ = resolve_(smaller(token_ + groups_.item(), tokens_.end - 1), groups_.position(), group.mine);
    holders_ = static_cast<Lanes>(op_.coop.ballot(mine_ != nullptr));
    return true;
  }

  const Op& op_;
  const Resolve resolve_;
  const int top_k_;
  ItemGroups<Claim, Load> groups_;
  uint64_t issued_;
  Range tokens_{0, 0};
  int token_ = 0, first_lane_ = 0;
  char* mine_ = nullptr;
  Lanes holders_ = 0;
};

// push_chunks() in groups: `items` has next_range(), and sink(token, k, packed) gets what packed(token, k) has loaded.
template <class Items, class Packed, class Source, class Sink, class BeforeLast>
JAX_EP_FN void push_groups(Op& op, RowMover& mover, Items items, int num_tokens, int64_t bytes, int top_k,
                           Packed packed, Source source, Sink sink, BeforeLast before_last) {
  op.enter(Phase::send);
  const TokenSchedule schedule(num_tokens);
  Announcer announcer(op, schedule);
  GroupedTokens tokens(op, items, top_k, packed, sink);
  mover.move([&] { return tokens.next([&](int token) { announcer.without_put(token); }); }, bytes, top_k, source,
             [&](int, int k) { return tokens.address(k); },
             [&](int token, auto& rows) { announcer.after(token, rows); });
  before_last();
  announcer.finish(mover);
}

// Copies every token that has landed on this rank to its rows: first the `own` tokens of this rank that have not
// travelled, then those of all peers, as they arrive. `row_of`: [R, T, K] as in DispatchArgs. from(source, token, row)
// and valid() are as in copy_to_rows(). All coops call.
template <class From, class Valid = Unchecked>
JAX_EP_FN void copy_arrivals(Op& op, RowMover& mover, const int32_t* row_of, int num_tokens, int own, int top_k,
                             char* rows, int64_t bytes, From from, Valid valid = {}) {
  const Coop& coop = op.coop;
  const int me = op.comm.rank;
  Arrivals arrivals(op, num_tokens, /*own=*/false, Coop::lanes / top_k);
  const int own_batches = ceil_div(own, arrivals.batch_tokens());
  Tickets<&SignalPad::ticket> tickets(op);
  // Tokens are numbered over all ranks, as in `row_of`.
  const auto claim = [&]() -> Range {
    for (int ticket; op.ok() && tickets.next(own_batches + arrivals.batches(), &ticket);) {
      Arrival batch{me, 0, {ticket * arrivals.batch_tokens(), smaller((ticket + 1) * arrivals.batch_tokens(), own)}};
      if (ticket >= own_batches) batch = arrivals.batch(ticket - own_batches);
      const int first = batch.source * num_tokens;
      if (batch.tokens.begin < batch.tokens.end) return {first + batch.tokens.begin, first + batch.tokens.end};
    }
    return {0, 0};
  };
  auto groups = groups_of(coop, top_k, claim,
                          [&](int token, int k) { return token < 0 ? -1 : row_of[int64_t{token} * top_k + k]; });
  Range tokens{0, 0};
  int token = 0, first_lane = 0;
  bool waits = false;            // for the chunk of the group's tokens
  int loaded = -1;               // this lane's row, unchecked
  const char* landed = nullptr;  // where this lane's token has landed
  char* to = nullptr;            // where this lane's token is copied to
  Lanes copied = 0;              // lanes with a `to`
  const auto next_group = [&] {
    if (!waits) {
      const auto group = groups.next();
      tokens = group.items;
      token = tokens.end;
      loaded = group.mine;
      if (tokens.begin == tokens.end) return false;
      groups.look_ahead();
    }
    const int source = tokens.begin / num_tokens, begin = tokens.begin - source * num_tokens;
    if (source != me && !arrivals.has_seen(source, arrivals.chunk_of(begin))) {
      waits = !arrivals.see(source, waits);
      if (waits || !op.ok()) return false;
      mover.acquire();
    }
    token = tokens.begin;
    const int row = valid(loaded), lane = groups.item() * top_k;  // the first lane of this lane's token
    const Lanes holders = static_cast<Lanes>(coop.ballot(row >= 0));
    const Lanes present = lane < Coop::lanes ? holders >> lane & first_lanes(top_k) : 0;
    const int first_row = coop.from_lane(row, (lane + (present ? lowest_bit(present) : 0)) % Coop::lanes);
    landed = present ? from(source, begin + groups.item(), first_row) : nullptr;
    char* const there = rows + row * bytes;
    to = row >= 0 && there != landed ? there : nullptr;
    copied = static_cast<Lanes>(coop.ballot(to != nullptr));
    const int tokens_here = count_bits(coop.ballot(present && groups.position() == 0));
    if (coop.lane == 0) op.count_received(source, tokens_here * bytes);
    return true;
  };
  const auto next = [&] {
    for (;;) {
      if (token == tokens.end && !next_group()) return -1;
      first_lane = (token - tokens.begin) * top_k;
      ++token;
      if (copied >> first_lane & first_lanes(top_k)) return first_lane;
    }
  };
  const auto sink = [&](int, int k) -> char* {
    char* const found = coop.from_lane(to, (first_lane + k) % Coop::lanes);
    return k < top_k ? found : nullptr;
  };
  if (own > 0) op.enter(Phase::expand);
  do  // move() ends before a wait, so that rows under way are written meanwhile
    mover.move(next, bytes, top_k, [&](int) { return coop.from_lane(landed, first_lane); }, sink, [](int, auto&) {});
  while (waits && op.ok());
}

}  // namespace jax_ep
