// The barrier among the teams of one rank.
#pragma once

#include "device/heap.h"
#include "device/spin.h"

namespace jax_ep {

// Everything any team did before it is visible to every team after it. A team that failed must not call it.
JAX_EP_FN Status rank_barrier(Heap* heap, const Team& team, uint64_t deadline_ns) {
  team.sync();
  int status = static_cast<int>(Status::ok);
  if (team.lane == 0) {
    const uint64_t round = load_relaxed(&heap->released);
    if (fetch_add(&heap->arrived, uint64_t{1}) == static_cast<uint64_t>(team.count) - 1) {
      store_relaxed(&heap->arrived, uint64_t{0});
      store_release(&heap->released, round + 1);
    } else {
      const auto done = [&] { return load_acquire(&heap->released) != round; };
      status = static_cast<int>(spin_until(done, &heap->abort, deadline_ns));
    }
  }
  return static_cast<Status>(team.broadcast(status));
}

}  // namespace jax_ep
