// A coop takes items in groups. A group needs one ticket, and all lanes load its data at once. With a ticket and a load
// for each item, short rows wait for both.
#pragma once

#include <utility>

#include "comm/integers.h"
#include "kernels/moe/layout.h"

namespace jax_ep {

static_assert(kEagerStep % Coop::lanes == 0 && kEagerTokens % kEagerStep == 0 && kMostEagerTokens % kEagerStep == 0,
              "senders' groups must not have both eager tokens and others");

// Whether an op of `tokens` tokens can take its items in groups. An item has `top_k` assignments and needs `width`
// lanes.
JAX_EP_CONSTANT_FN bool fits_groups(int tokens, int top_k, int width) {
  return Coop::lanes > 1 && tokens > kFewTokens && top_k > 0 && width <= Coop::lanes;
}
// Whether dispatch and scatter take groups. Long rows need none: moving one takes longer than the next ticket.
JAX_EP_CONSTANT_FN bool takes_groups(int tokens, int top_k, int64_t row_bytes) {
  return fits_groups(tokens, top_k, top_k) && row_bytes <= kShortRowBytes;
}

// The number of items in a sender's group: as many as fit, but so few that each of `coops` coops gets kGroupsPerCoop
// groups, because peers wait for a chunk until all of its groups are sent. If these groups would have fewer than
// kFewItems items, which costs more than that wait, a coop may get as few as kLeastGroupsPerCoop. The number is a power
// of two, so that no such group has both eager tokens and others.
JAX_EP_FN int group_items(int items, int width, int coops) {
  constexpr int kGroupsPerCoop = 16, kLeastGroupsPerCoop = 4, kFewItems = 4;  // tuned with `kernels_bench 2`
  const int few = smaller(kFewItems, items / (kLeastGroupsPerCoop * coops));
  const int most = smaller(Coop::lanes / width, larger(few, items / (kGroupsPerCoop * coops)));
  int count = 1;
  while (2 * count <= most) count *= 2;
  return count;
}

// Neighbouring items. Lane i has the value of item `items.begin + i / width`, position i % width.
template <class Value>
struct ItemGroup {
  Range items{0, 0};  // none after the last group
  Value mine{};
};

// next() returns group after group. look_ahead() claims the following group early, and loads its values.
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

}  // namespace jax_ep
