// The parts and ranges that work is divided into, and what lanes learn of each other. Included by the platforms'
// headers, after their function prefixes.
#pragma once

namespace jax_ep {

// Part number `index` of `count`. Empty if `count` is 0.
struct Part {
  int index = 0;
  int count = 0;

  JAX_EP_CONSTANT_FN bool empty() const { return count == 0; }
};

// The part of a coop among all senders, which are the first `senders` coops of each CTA. Neighbouring parts are in
// different CTAs, so that few rows use all CTAs.
JAX_EP_CONSTANT_FN Part sender_part(int cta, int ctas, int coop, int senders) {
  return coop < senders ? Part{coop * ctas + cta, ctas * senders} : Part{};
}

// The part of a coop among all receivers: the coops that do not send, or all coops if all send.
JAX_EP_CONSTANT_FN Part receiver_part(int cta, int ctas, int coop, int coops, int senders) {
  const int receivers = senders < coops ? coops - senders : coops;
  const int first = senders < coops ? senders : 0;
  return coop >= first ? Part{(coop - first) * ctas + cta, ctas * receivers} : Part{};
}

// Which track of its CTA's timeline a coop writes. Only the first sender and the first receiver have a track.
enum class TrackRole : int { sender, receiver, none };

JAX_EP_CONSTANT_FN TrackRole track_of(int coop, int senders) {
  return coop == 0 ? TrackRole::sender : coop == senders ? TrackRole::receiver : TrackRole::none;
}

struct Range {
  int begin, end;
};

// The contiguous range of `items` that part `index` of `count` takes.
JAX_EP_FN Range part_of(int items, int index, int count) {
  return {static_cast<int>(int64_t{items} * index / count), static_cast<int>(int64_t{items} * (index + 1) / count)};
}

// What Coop::match() returns: how many lanes have the same value as this one, before it and in all.
struct Match {
  int below, total;
};

// The most coops of a CTA, on any platform.
constexpr int kMaxCtaCoops = 8;

}  // namespace jax_ep
