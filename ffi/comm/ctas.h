// Barriers among the CTAs of a rank, and the choice of the CTAs that are members of an op.
#pragma once

#include "comm/platform.h"
#include "comm/signal_pad.h"
#include "comm/spin.h"

namespace jax_ep {

// A barrier of the first `ctas` CTAs. All their coops call it, and then cta_sync(). After that every coop sees what the
// others wrote before the barrier. A coop whose op has failed passes `join` = false; the other CTAs see the abort word.
// Only the first coop of each CTA waits and gets the status. If its wait failed, it raises the abort word before the
// cta_sync().
JAX_EP_FN Status cta_barrier(BarrierWords* words, const Coop& coop, int ctas, bool join, const uint64_t* abort_word,
                             uint64_t timeout_ns) {
  coop.cta_sync();
  int status = static_cast<int>(Status::ok);
  if (coop.in_cta.index == 0 && coop.lane == 0 && ctas > 1 && join) {
    const uint64_t round = load_relaxed(&words->released);
    if (fetch_add(&words->arrived, uint64_t{1}) == static_cast<uint64_t>(ctas) - 1) {
      store_relaxed(&words->arrived, uint64_t{0});
      store_release_here(&words->released, round + 1);
    } else {
      status = static_cast<int>(spin_until(&words->released, round + 1, abort_word, timeout_ns).status);
    }
  }
  return static_cast<Status>(coop.broadcast(status));
}

// Members take part in an op's barriers: the CTAs that have started by the time the earliest one stops waiting. If
// another kernel holds SMs, the other CTAs may start only after the members have ended, so no member may wait for them.

// How long the first CTAs wait for the others, which usually begin within 1 us. Tuned with `residency`. CPU threads
// outnumber the cores, so they wait longer.
constexpr uint64_t kJoinNs = Coop::lanes == 1 ? 10'000'000 : 20'000;

// The part of this CTA among the members, or an empty part if the members were already counted. One lane of a CTA
// calls. The low half of `words` counts the CTAs that have begun, the high half the members.
JAX_EP_COLD_FN Part join(uint64_t* words, int ctas) {
  const auto members = [](uint64_t seen) { return static_cast<int>(seen >> 32); };
  const auto begun = [](uint64_t seen) { return static_cast<int>(seen & 0xffffffff); };
  const uint64_t before = fetch_add(words, uint64_t{1});
  if (members(before)) return {};
  const int index = begun(before);
  uint64_t since = 0;
  for (unsigned tries = 0;; ++tries) {
    const uint64_t seen = load_acquire(words);
    if (members(seen)) return {index, members(seen)};
    if (begun(seen) == ctas) return {index, ctas};  // nobody is left to come late
    const uint64_t now = clock_ns();
    if (!since) since = now;
    if (now - since > kJoinNs) compare_exchange(words, seen, seen | seen << 32);
    pause(tries);
  }
}

// Whether all `count` coops of a role have begun. Each of these coops calls, and waits up to kJoinNs. `begun` is zero
// when the op begins. A coop that gets false leaves. The last coop to begin gets true, so at least one stays. It may
// wait for peers, because no other coop of this rank needs an SM any more.
JAX_EP_FN bool all_begin(const Coop& coop, uint64_t* begun, int count) {
  int all = 0;
  if (coop.lane == 0) {
    atomic_add(begun, uint64_t{1});
    const uint64_t since = clock_ns();
    for (unsigned tries = 0;; ++tries) {
      all = load_acquire(begun) == static_cast<uint64_t>(count);
      if (all || clock_ns() - since > kJoinNs) break;
      pause(tries);
    }
  }
  return coop.broadcast(all);
}

// All coops of a CTA call. Overwrites the first bytes of the CTA's shared memory.
JAX_EP_FN Part join_cta(const Coop& coop, uint64_t* words, int ctas) {
  Part joined{0, 1};
  if (ctas == 1) return joined;
  if constexpr (Coop::lanes == 1) {
    joined = join(words, ctas);
  } else {
    auto* const part = reinterpret_cast<int*>(coop.shared - coop.in_cta.index * coop.shared_bytes);
    if (coop.in_cta.index == 0 && coop.lane == 0) {
      joined = join(words, ctas);
      part[0] = joined.index;
      part[1] = joined.count;
    }
    coop.cta_sync();
    joined = {part[0], part[1]};
    coop.cta_sync();  // before others use the memory
  }
  return joined;
}

// Renumbers a part over the coops of members alone, in the order of sender_part().
JAX_EP_FN Part among_members(Part part, Part cta, Part joined) {
  const int of_cta = part.count / cta.count;  // parts
  return of_cta == 0 ? Part{} : Part{part.index / cta.count * joined.count + joined.index, of_cta * joined.count};
}

// This coop, numbered among the coops of member CTAs. A coop of another CTA has no part in the op.
JAX_EP_FN Coop as_member(Coop coop, Part cta) {
  if (cta.empty()) {
    coop.sender = coop.receiver = coop.cta = {};
  } else if constexpr (Coop::lanes == 1) {
    coop.index = cta.index;
    coop.count = cta.count;
    coop.sender = coop.receiver = coop.cta = cta;
  } else {
    coop.index = cta.index * coop.in_cta.count + coop.in_cta.index;
    coop.count = cta.count * coop.in_cta.count;
    coop.sender = among_members(coop.sender, coop.cta, cta);
    coop.receiver = among_members(coop.receiver, coop.cta, cta);
    coop.cta = cta;
  }
  return coop;
}

// This coop as a member. A coop whose CTA came too late only finishes the op.
JAX_EP_FN Coop join_op(const Comm& comm, const Coop& coop) {
  return as_member(coop, join_cta(coop, &comm.own_signal_pad->members, coop.cta.count));
}

}  // namespace jax_ep
