// The timeline of a rank's kernels: when each CTA entered each phase of each op.
//
// The first coop of each role in a CTA has a track. Only that coop appends to it, so there are no atomics. A track is a
// ring that is never reset: the host knows where a profile began. A phase ends where the next event of its track
// begins. Without a profile, a phase costs one comparison.
//
// Products have a timeline of their own, with one track a CTA (gemm/kernel.h). Two products of a device do not overlap.
#pragma once

#include <cstdint>

#include "comm/platform.h"
#include "comm/signal_pad.h"

namespace jax_ep {

// The work of a coop; `none` between ops.
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
  give_up,
  arrive,   // on the CPU: the rank waits until all ranks of its process have called the op
  multiply  // a tile of a product
};

struct Event {
  uint64_t ns;  // of the device's clock
  // The op's epoch from bit kEpochBit on, its kind from bit kOpBit on, the phase from bit 0 on. A product has no kind,
  // and the shape of its matrix (gemm/problem.h) instead of an epoch.
  uint64_t what;
};
constexpr int kEpochBit = 16, kOpBit = 8;

struct alignas(32) Track {
  uint64_t count;  // of all events so far
  uint64_t mask;   // the ring's length - 1
  Event* events;
};

constexpr int kTrackRoles = static_cast<int>(TrackRole::none);
struct Timeline {
  uint64_t ctas;  // later CTAs have no tracks
  Track* tracks;
};

// In host memory. The host increments `asked`, and the device writes its time.
struct ClockRequest {
  uint64_t asked, answered, ns;
  uint64_t cancelled;
};

// This lane's track, or null if the lane has none or there is no profile.
JAX_EP_FN Track* find_track(const SignalPad* signal_pad, const Coop& coop) {
  if (coop.lane != 0 || !load_relaxed(&signal_pad->timeline)) return nullptr;
  const auto* timeline = reinterpret_cast<const Timeline*>(load_acquire(&signal_pad->timeline));
  if (!timeline) return nullptr;  // the profile ended just now
  if (coop.track == TrackRole::none || coop.cta.empty()) return nullptr;
  if (static_cast<uint64_t>(coop.cta.index) >= timeline->ctas) return nullptr;
  return &timeline->tracks[coop.cta.index * kTrackRoles + static_cast<int>(coop.track)];
}

JAX_EP_FN void append(Track* track, uint64_t epoch, OpKind op, Phase phase) {
  const uint64_t count = load_relaxed(&track->count);
  Event* event = &track->events[count & track->mask];
  store_relaxed(&event->what, epoch << kEpochBit | static_cast<uint64_t>(op) << kOpBit | static_cast<uint64_t>(phase));
  store_relaxed(&event->ns, clock_ns());
  store_relaxed(&track->count, count + 1);
}

}  // namespace jax_ep
