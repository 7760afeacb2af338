// The parts and ranges that work is divided into. Included by the targets, behind their function prefixes.
#pragma once

namespace jax_ep {

struct Part {
  int index;
  int count;

  JAX_EP_CONSTANT_FN static Part none_of(int count) { return {-1, count}; }
  JAX_EP_CONSTANT_FN bool takes_part() const { return index >= 0; }
};

// The first `senders` coops of a CTA send: neighbouring parts are in different CTAs, to spread few rows ...
JAX_EP_CONSTANT_FN Part sender_part(int cta, int ctas, int coop, int senders) {
  return {coop < senders ? coop * ctas + cta : -1, ctas * senders};
}

// ... and the others receive, or all of them where there are no others.
JAX_EP_CONSTANT_FN Part receiver_part(int cta, int ctas, int coop, int coops, int senders) {
  const int receivers = senders < coops ? coops - senders : coops;
  const int first = senders < coops ? senders : 0;
  return {coop >= first ? (coop - first) * ctas + cta : -1, ctas * receivers};
}

// Which track of its CTA's timeline a coop writes: the first sender 0, the first receiver 1, others none.
JAX_EP_CONSTANT_FN int track_of(int coop, int senders) { return coop == 0 ? 0 : coop == senders ? 1 : -1; }

struct Range {
  int begin, end;
};

// The contiguous share of `items` that one coop of `count` takes.
JAX_EP_FN Range share(int items, int index, int count) {
  return {static_cast<int>(int64_t{items} * index / count), static_cast<int>(int64_t{items} * (index + 1) / count)};
}

// The most coops of a CTA: what is sized by them is sized alike everywhere.
constexpr int kMaxCtaCoops = 8;

}  // namespace jax_ep
