// The timeline inside a rank's kernels: when each squad entered which phase of which op.
//
// A track belongs to the first team of each role in a squad, which alone appends to it: no atomics. It is a ring that
// is never reset; the host remembers where a recording began. A phase ends where the next event of its track begins.
#pragma once

#include <cstdint>

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

}  // namespace jax_ep
