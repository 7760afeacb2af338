// Squads of a rank that meet: at a barrier, or to find out which of them take part in an op.
#pragma once

#include "comm/heap.h"
#include "comm/platform.h"
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

// The members of an op whose squads meet at barriers are the squads that have begun when the first ones stop waiting
// for more. A kernel that runs beside others may get processors for some of its squads only; the rest begin when these
// have ended, and must not be waited for.

// How long the first squads wait for the others, which usually begin within a microsecond.
constexpr uint64_t kJoinNs = Team::lanes == 1 ? 10'000'000 : 20'000;

// Returns the number of this squad among the members, and how many they are; the number is -1 if they were settled
// before it began. One lane of a squad calls. `words` is one word of the heap: squads that have begun in its low half,
// members in its high half.
JAX_EP_COLD_FN Place join(uint64_t* words, int squads) {
  const auto settled = [](uint64_t seen) { return static_cast<int>(seen >> 32); };
  const auto begun = [](uint64_t seen) { return static_cast<int>(seen & 0xffffffff); };
  const uint64_t before = fetch_add(words, uint64_t{1});
  if (settled(before)) return {-1, settled(before)};
  const int index = begun(before);
  uint64_t since = 0;
  for (unsigned tries = 0;; ++tries) {
    const uint64_t seen = load_acquire(words);
    if (settled(seen)) return {index, settled(seen)};
    if (begun(seen) == squads) return {index, squads};  // nobody is left to come late
    const uint64_t now = clock_ns();
    if (!since) since = now;
    if (now - since > kJoinNs) compare_exchange(words, seen, seen | seen << 32);
    pause(tries);
  }
}

// All teams of a squad call; the first bytes of its shared memory are overwritten.
JAX_EP_FN Place join_squad(const Team& team, uint64_t* words, int squads) {
  Place joined{0, 1};
  if (squads == 1) return joined;
  if constexpr (Team::lanes == 1) {
    joined = join(words, squads);
  } else {
    auto* const told = reinterpret_cast<int*>(team.shared - team.member.index * team.shared_bytes);
    if (team.member.index == 0 && team.lane == 0) {
      joined = join(words, squads);
      told[0] = joined.index;
      told[1] = joined.count;
    }
    team.squad_sync();
    joined = {told[0], told[1]};
    team.squad_sync();  // before the memory is used otherwise
  }
  return joined;
}

// This team, numbered as if the member squads were all squads. A thread of the CPU both pushes and fills.
JAX_EP_FN Team as_member(Team team, Place squad) {
  if constexpr (Team::lanes == 1) {
    team.index = squad.index;
    team.count = squad.count;
    team.pusher = team.filler = team.squad = squad;
    return team;
  }
  const int pushers = team.pusher.count / team.squad.count;
  team.index = squad.index * team.member.count + team.member.index;
  team.count = squad.count * team.member.count;
  team.pusher = pusher_place(squad.index, squad.count, team.member.index, pushers);
  team.filler = filler_place(squad.index, squad.count, team.member.index, team.member.count, pushers);
  team.squad = squad;
  return team;
}

// This team among those of all squads of its rank that have begun. Its squad has index -1 if it came too late: then it
// only finishes the op.
JAX_EP_FN Team join_op(const Comm& comm, const Team& team) {
  return as_member(team, join_squad(team, &comm.heaps[comm.rank]->members, team.squad.count));
}

}  // namespace jax_ep
