// The barrier among squads of one rank.
#pragma once

#include "comm/heap.h"
#include "comm/spin.h"

namespace jax_ep {

// Everything any team of the first `squads` did before it is visible to all of them behind the squad_sync() that must
// follow it. All teams of a squad call it, also those for which the op has failed: `join` is then false, and the others
// find the abort word. One team of a squad stands for all, and alone learns the status: it raises the abort word, if
// need be, before that squad_sync().
JAX_EP_FN Status squad_barrier(BarrierWords* words, const Team& team, int squads, bool join, const uint64_t* abort_word,
                               uint64_t timeout_ns) {
  team.squad_sync();
  int status = static_cast<int>(Status::ok);
  if (team.member.index == 0 && team.lane == 0 && squads > 1 && join) {
    const uint64_t round = load_relaxed(&words->released);
    if (fetch_add(&words->arrived, uint64_t{1}) == static_cast<uint64_t>(squads) - 1) {
      store_relaxed(&words->arrived, uint64_t{0});
      store_release_here(&words->released, round + 1);
    } else {
      status = static_cast<int>(spin_until(&words->released, round + 1, abort_word, timeout_ns).status);
    }
  }
  return static_cast<Status>(team.broadcast(status));
}

}  // namespace jax_ep
