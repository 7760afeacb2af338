// The timeline inside a rank's kernels: when each squad entered which phase of which op.
//
// A track belongs to the first team of each role in a squad, which alone appends to it: no atomics. It is a ring that
// is never reset; the host remembers where a recording began. A phase ends where the next event of its track begins.
// Where no timeline is kept, this costs one comparison a phase.
#pragma once

#include <cstdint>

#include "comm/heap.h"
#include "comm/platform.h"

namespace jax_ep {

// What a team is busy with; `none` between ops.
enum class Phase : int32_t {
  none,
  poison,
  count,
  post,
  wait,
  layout,
  place,
  barrier,
  send,
  pad,
  expand,
  reduce,
  give_up
};

struct Event {
  uint64_t ns;    // of the device's clock
  uint64_t what;  // of the op its epoch and kind, and the phase, in bits from kEpochBit, kOpBit and 0
};
constexpr int kEpochBit = 16, kOpBit = 8;

struct alignas(32) Track {
  uint64_t count;  // of events, ever
  uint64_t mask;   // the ring's length - 1
  Event* events;
};

// Of one rank: a track per role of each squad.
constexpr int kTrackRoles = 2;  // pushing, filling
struct Timeline {
  uint64_t squads;  // further ones are not recorded
  Track* tracks;
};

// In host memory: the host counts up `asked`, the device answers with its time.
struct ClockFace {
  uint64_t asked, answered, ns;
  uint64_t cancelled;
};

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
