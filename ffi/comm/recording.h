// Appending to a timeline. Where none is kept, this costs one comparison a phase.
#pragma once

#include "comm/heap.h"
#include "comm/platform.h"
#include "comm/timeline.h"

namespace jax_ep {

// This lane's track, or null: it has none, or nothing is recorded now.
JAX_EP_FN Track* find_track(const Heap* heap, const Team& team) {
  if (team.lane != 0 || !load_relaxed(&heap->timeline)) return nullptr;
  const auto* timeline = reinterpret_cast<const Timeline*>(load_acquire(&heap->timeline));
  if (!timeline) return nullptr;  // the recording ended just now
  const int fillers_begin = team.pusher.count / team.squad.count, member = team.member.index;
  const int role = member == 0 ? 0 : 1;
  if ((role == 1 && member != fillers_begin) || static_cast<uint64_t>(team.squad.index) >= timeline->squads)
    return nullptr;
  return &timeline->tracks[team.squad.index * kTrackRoles + role];
}

JAX_EP_FN void append(Track* track, uint64_t epoch, OpKind op, Phase phase) {
  const uint64_t count = load_relaxed(&track->count);
  Event* event = &track->events[count & track->mask];
  store_relaxed(&event->what, epoch << kEpochBit | static_cast<uint64_t>(op) << kOpBit | static_cast<uint64_t>(phase));
  store_relaxed(&event->ns, clock_ns());
  store_relaxed(&track->count, count + 1);
}

}  // namespace jax_ep
