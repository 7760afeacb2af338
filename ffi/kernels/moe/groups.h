// A coop takes items in groups. A group needs one ticket, and all lanes load its data at once. With a ticket and a load
// for each item, short rows wait for both.
#pragma once

#include <utility>

#include "comm/integers.h"
#include "comm/op.h"
#include "kernels/moe/layout.h"
#include "rows/terms.h"

namespace jax_ep {

static_assert(kEagerStep % Coop::lanes == 0 && kEagerTokens % kEagerStep == 0 && kMostEagerTokens % kEagerStep == 0,
              "groups must not have both eager tokens and others");

// Whether an op of `tokens` tokens can take its items in groups. An item has `top_k` assignments and needs `width`
// lanes.
JAX_EP_CONSTANT_FN bool fits_groups(int tokens, int top_k, int width) {
  return Coop::lanes > 1 && tokens > kFewTokens && top_k > 0 && width <= Coop::lanes;
}
// Whether dispatch and scatter take groups. Long rows need none: moving one takes longer than the next ticket.
JAX_EP_CONSTANT_FN bool takes_groups(int tokens, int top_k, int64_t row_bytes) {
  return fits_groups(tokens, top_k, top_k) && row_bytes <= kShortRowBytes;
}

// The number of items in a group: as many as fit, but so few that each of `coops` coops gets several groups. It is a
// power of two, so that no group has both eager tokens and others.
JAX_EP_FN int group_items(int items, int width, int coops) {
  constexpr int kGroupsPerCoop = 4;  // tuned with `kernels_bench 2`
  const int most = smaller(Coop::lanes / width, items / (kGroupsPerCoop * coops));
  int count = 1;
  while (2 * count <= most) count *= 2;
  return count;
}
// The tokens of a sender's ticket, in an op that pushes `tokens` tokens.
JAX_EP_FN int tokens_per_ticket(const Op& op, int tokens, int top_k, int64_t row_bytes) {
  return takes_groups(tokens, top_k, row_bytes) ? group_items(tokens, top_k, op.coop.sender.count) : 1;
}

// Neighbouring items. Lane i has the value of item `items.begin + i / width`, position i % width.
template <class Value>
struct ItemGroup {
  Range items{0, 0};  // none after the last group
  Value mine{};
};

// next() returns group after group. look_ahead() claims the group after that, and loads its values while the coop works
// on this one.
//
// claim() returns the items of the next group, at most Coop::lanes / width. After the last group it returns none. It
// may wait. load(item, position) loads a value, or returns none for a negative item.
template <class Claim, class Load>
class ItemGroups {
 public:
  using Value = decltype(std::declval<Load&>()(0, 0));

  JAX_EP_FN ItemGroups(const Coop& coop, int width, Claim claim, Load load)
      : claim_(claim), load_(load), item_(coop.lane / width), position_(coop.lane % width) {}

  // Which item of a group this lane has, and which of the item's positions.
  JAX_EP_FN int item() const { return item_; }
  JAX_EP_FN int position() const { return position_; }

  JAX_EP_FN ItemGroup<Value> next() {
    if (!ahead_) look_ahead();
    ahead_ = false;
    return then_;
  }
  JAX_EP_FN void look_ahead() {
    const Range items = claim_();
    const int item = items.begin + item_;
    then_ = {items, load_(item < items.end ? item : -1, position_)};
    ahead_ = true;
  }

 private:
  Claim claim_;
  Load load_;
  const int item_, position_;
  bool ahead_ = false;  // whether the next group is claimed: it is `then_`
  ItemGroup<Value> then_;
};

template <class Claim, class Load>
JAX_EP_FN ItemGroups<Claim, Load> groups_of(const Coop& coop, int width, Claim claim, Load load) {
  return {coop, width, claim, load};
}

// The tokens of `items`, one by one, and an address for each of a token's `top_k` assignments: resolve(token, k,
// packed) of what load(token, k) has loaded, or null. All lanes call.
//
// If `ahead`, what is known of a group of tokens is loaded while the group before is under way, and resolved by all
// lanes at once. Otherwise it is loaded for each token when its addresses are asked for, and the first token begins
// sooner.
template <class Items, class Load, class Resolve>
class Tokens {
 public:
  JAX_EP_FN Tokens(const Op& op, Items& items, int top_k, bool ahead, Load load, Resolve resolve)
      : op_(op),
        items_(items),
        load_(load),
        resolve_(resolve),
        top_k_(top_k),
        ahead_(ahead),
        groups_(op.coop, ahead ? top_k : 1, Claim{&items}, load),
        issued_(op.ask_abort()) {}

  // The next token, or -1 if there is none or the group has failed. Calls skipped(token) for a token that is known to
  // have no addresses.
  template <class Skipped>
  JAX_EP_FN int next(Skipped skipped) {
    if (!ahead_) {
      const int token = items_.next();
      return may_push() ? token : -1;
    }
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

  // The k-th address of the token that next() returned last, or of another one if not `ahead`.
  JAX_EP_FN char* address(int token, int k) const {
    if (!ahead_) return resolve_(token, k, load_(token, k));
    char* const found = op_.coop.from_lane(mine_, (first_lane_ + k) % Coop::lanes);
    return k < top_k_ ? found : nullptr;
  }

 private:
  struct Claim {
    Items* items;
    JAX_EP_FN Range operator()() const { return items->next_range(); }
  };

  // Looks at the abort word as it was at the call before, or while a ticket was drawn, which hides its latency. So up
  // to two groups may follow an abort.
  JAX_EP_FN bool may_push() {
    const bool failed = op_.take_abort(issued_);
    issued_ = op_.ask_abort();
    return !failed;
  }
  JAX_EP_FN bool next_group() {
    const auto group = groups_.next();
    const bool more = may_push() && op_.ok() && group.items.begin < group.items.end;
    tokens_ = more ? group.items : Range{0, 0};
    token_ = tokens_.begin;
    if (!more) return false;
    mine_ = resolve_(smaller(token_ + groups_.item(), tokens_.end - 1), groups_.position(), group.mine);
    holders_ = static_cast<Lanes>(op_.coop.ballot(mine_ != nullptr));
    return true;
  }

  const Op& op_;
  Items& items_;
  const Load load_;
  const Resolve resolve_;
  const int top_k_;
  const bool ahead_;  // then top_k is 1 to Coop::lanes
  ItemGroups<Claim, Load> groups_;
  uint64_t issued_;
  Range tokens_{0, 0};
  int token_ = 0, first_lane_ = 0;
  char* mine_ = nullptr;
  Lanes holders_ = 0;
};

}  // namespace jax_ep
