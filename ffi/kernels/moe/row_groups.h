// Moves short rows along a routing in groups of tokens (groups.h), by the schedule of rows.h.
#pragma once

#include "comm/integers.h"
#include "comm/op.h"
#include "comm/push.h"
#include "comm/tickets.h"
#include "kernels/moe/groups.h"
#include "kernels/moe/rows.h"
#include "rows/movers.h"
#include "rows/terms.h"

namespace jax_ep {

// The tokens of a group one by one. Each lane has the address of one of their assignments, or null. All lanes call.
class TokenWalk {
 public:
  JAX_EP_FN TokenWalk(const Coop& coop, int top_k) : coop_(coop), top_k_(top_k) {}

  JAX_EP_FN void begin(Range tokens, char* mine) {
    next_ = tokens.begin;
    tokens_ = tokens;
    mine_ = mine;
    holders_ = static_cast<Lanes>(coop_.ballot(mine != nullptr));
  }
  JAX_EP_FN bool done() const { return next_ == tokens_.end; }
  JAX_EP_FN int next() {
    first_lane_ = (next_ - tokens_.begin) * top_k_;
    return next_++;
  }

  // Of the token that next() has returned: whether an assignment has an address, and the k-th address.
  JAX_EP_FN bool has_address() const { return holders_ >> first_lane_ & first_lanes(top_k_); }
  JAX_EP_FN char* address(int k) const {
    char* const found = coop_.from_lane(mine_, (first_lane_ + k) % Coop::lanes);
    return k < top_k_ ? found : nullptr;
  }
  JAX_EP_FN int first_lane() const { return first_lane_; }

 private:
  const Coop& coop_;
  const int top_k_;
  Range tokens_{0, 0};
  int next_ = 0, first_lane_ = 0;
  char* mine_ = nullptr;
  Lanes holders_ = 0;
};

// Hands out the tokens of `items` one by one. Each lane gets one address of a group: resolve(token, k, loaded), or
// null. load(token, k) loads what resolve() needs while the group before is under way.
template <class Items, class Load, class Resolve>
class GroupedTokens {
 public:
  JAX_EP_FN GroupedTokens(const Op& op, Items& items, int top_k, Load load, Resolve resolve)
      : op_(op),
        resolve_(resolve),
        groups_(op.coop, top_k, Claim{&items}, load),
        walk_(op.coop, top_k),
        issued_(op.ask_abort()) {}

  // The next token with an address, or -1 if there is none or the op has failed. Calls skipped(token) for a token
  // without addresses.
  template <class Skipped>
  JAX_EP_FN int next(Skipped skipped) {
    for (;;) {
      if (walk_.done() && !next_group()) return -1;
      const int token = walk_.next();
      // At half of the group, because the claim waits for the rows of tokens that are not eager.
      if (token == half_) groups_.look_ahead();
      if (walk_.has_address()) return token;
      skipped(token);
    }
  }

  // The k-th address of the token that next() returned last.
  JAX_EP_FN char* address(int k) const { return walk_.address(k); }

 private:
  struct Claim {
    Items* items;
    JAX_EP_FN Range operator()() const { return items->next_range(); }
  };

  // Uses the abort word that was loaded at the group before, so that the load costs no wait.
  JAX_EP_FN bool next_group() {
    const auto group = groups_.next();
    const auto [begin, end] = group.items;
    const bool failed = op_.take_abort(issued_);
    issued_ = op_.ask_abort();
    if (failed || begin == end) return false;
    walk_.begin(group.items, resolve_(smaller(begin + groups_.item(), end - 1), groups_.position(), group.mine));
    half_ = (begin + end) / 2;
    return true;
  }

  const Op& op_;
  const Resolve resolve_;
  ItemGroups<Claim, Load> groups_;
  TokenWalk walk_;
  uint64_t issued_;
  int half_ = 0;
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

// push_groups() or push_chunks().
template <bool kGrouped, class Items, class Packed, class Source, class Sink, class BeforeLast>
JAX_EP_FN void push_tokens(Op& op, RowMover& mover, const Items& items, int num_tokens, int64_t bytes, int top_k,
                           Packed packed, Source source, Sink sink, BeforeLast before_last) {
  if constexpr (kGrouped)
    push_groups(op, mover, items, num_tokens, bytes, top_k, packed, source, sink, before_last);
  else
    push_chunks(
        op, mover, items, num_tokens, bytes, top_k, source,
        [&](int token, int k) { return sink(token, k, packed(token, k)); }, before_last);
}

// Copies every token that has landed on this rank to its rows: first this rank's first `own` tokens, which were not
// sent, then those of all peers, as they arrive. `row_of`: [R, T, K] as in DispatchArgs. valid(row) is negative if
// there is no row. Each lane calls from(source, token, row) for its own token, whose first row is `row`; it returns
// where the token has landed. All coops call.
template <class From, class Valid = Unchecked>
JAX_EP_FN void copy_arrivals(Op& op, RowMover& mover, const int32_t* row_of, int num_tokens, int own, int top_k,
                             char* rows, int64_t bytes, From from, Valid valid = {}) {
  const Coop& coop = op.coop;
  const int me = op.comm.rank;
  Arrivals arrivals(op, num_tokens, /*own=*/false, Coop::lanes / top_k);
  const int batch_tokens = arrivals.batch_tokens(), own_batches = ceil_div(own, batch_tokens);
  Tickets<&SignalPad::ticket> tickets(op);
  const auto numbered = [&](int source, Range tokens) -> Range {  // over all ranks, as in `row_of`
    return {source * num_tokens + tokens.begin, source * num_tokens + tokens.end};
  };
  const auto claim = [&]() -> Range {
    for (int ticket; op.ok() && tickets.next(own_batches + arrivals.batches(), &ticket);) {
      if (ticket < own_batches) return numbered(me, {ticket * batch_tokens, smaller((ticket + 1) * batch_tokens, own)});
      const Arrival batch = arrivals.batch(ticket - own_batches);
      if (batch.tokens.begin < batch.tokens.end) return numbered(batch.source, batch.tokens);
    }
    return {0, 0};
  };
  auto groups = groups_of(coop, top_k, claim,
                          [&](int token, int k) { return token < 0 ? -1 : row_of[int64_t{token} * top_k + k]; });
  auto group = decltype(groups.next()){};
  TokenWalk walk(coop, top_k);
  bool waits = false;            // for the chunk of `group`
  const char* landed = nullptr;  // where this lane's token has landed
  const auto next_group = [&] {
    if (!waits) {
      group = groups.next();
      if (group.items.begin == group.items.end) return false;
      groups.look_ahead();
    }
    const int source = group.items.begin / num_tokens, token = group.items.begin - source * num_tokens;
    if (source != me && !arrivals.has_seen(source, arrivals.chunk_of(token))) {
      waits = !arrivals.see(source, waits);
      if (waits || !op.ok()) return false;
      mover.acquire();
    }
    const int row = valid(group.mine), lane = groups.item() * top_k;  // the first lane of this lane's token
    const Lanes present = static_cast<Lanes>(coop.ballot(row >= 0)) >> lane & first_lanes(top_k);
    const int first_row = coop.from_lane(row, lane + (present ? lowest_bit(present) : 0));
    landed = present ? from(source, token + groups.item(), first_row) : nullptr;
    char* const to = rows + row * bytes;
    walk.begin(group.items, row >= 0 && to != landed ? to : nullptr);
    const int tokens_here = count_bits(coop.ballot(present && groups.position() == 0));
    if (coop.lane == 0) op.count_received(source, tokens_here * bytes);
    return true;
  };
  const auto next = [&] {
    for (;;) {
      if (walk.done() && !next_group()) return -1;
      const int token = walk.next();
      if (walk.has_address()) return token;
    }
  };
  if (own > 0) op.enter(Phase::expand);
  do  // move() ends before a wait, so that rows under way are written meanwhile
    mover.move(
        next, bytes, top_k, [&](int) { return coop.from_lane(landed, walk.first_lane()); },
        [&](int, int k) { return walk.address(k); }, [](int, auto&) {});
  while (waits);
}

}  // namespace jax_ep
