// Parts and ranges of work. The platforms' headers include this file after their function prefixes.
#pragma once

namespace jax_ep {

// Part number `index` of `count`. Empty if `count` is 0.
struct Part {
  int index = 0;
  int count = 0;

  JAX_EP_CONSTANT_FN bool empty() const { return count == 0; }
};

// The part of a coop among all senders: the first `senders` coops of each CTA. Adjacent parts are in different CTAs, so
// that a few rows use all CTAs.
JAX_EP_CONSTANT_FN Part sender_part(int cta, int ctas, int coop, int senders) {
  return coop < senders ? Part{coop * ctas + cta, ctas * senders} : Part{};
}

// The part of a coop among all receivers: the coops that do not send, or all coops if all send.
JAX_EP_CONSTANT_FN Part receiver_part(int cta, int ctas, int coop, int coops, int senders) {
  const int receivers = senders < coops ? coops - senders : coops;
  const int first = senders < coops ? senders : 0;
  return coop >= first ? Part{(coop - first) * ctas + cta, ctas * receivers} : Part{};
}

// Which track of its CTA's timeline a coop writes: only the first sender and the first receiver have one.
enum class TrackRole : int { sender, receiver, none };

JAX_EP_CONSTANT_FN TrackRole track_of(int coop, int senders) {
  return coop == 0 ? TrackRole::sender : coop == senders ? TrackRole::receiver : TrackRole::none;
}

struct Range {
  int begin, end;
};

// The contiguous range of `items` in part `index` of `count`.
JAX_EP_FN Range part_of(int items, int index, int count) {
  return {static_cast<int>(int64_t{items} * index / count), static_cast<int>(int64_t{items} * (index + 1) / count)};
}

// How many lanes have the same value as this one: lanes before it, and all (Coop::match).
struct Match {
  int below, total;
};

constexpr int kMaxCtaCoops = 8;

}  // namespace jax_ep
