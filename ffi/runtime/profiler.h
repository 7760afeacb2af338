// Switches the timelines of a group's ranks on and off, and reads them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "comm/timeline.h"
#include "runtime/group.h"
#include "runtime/memory.h"

namespace jax_ep {

const char* name_of(Phase phase);

// The products of a platform, of up to `ctas` CTAs. `timelines` returns the words in which the kernels of products on a
// device look for their `Timeline`: none, if the device has no such kernels. It throws std::runtime_error.
struct Products {
  int ctas = 0;
  std::vector<uint64_t*> (*timelines)(int device) = nullptr;
};

// The role of the spans of products, beside those of TrackRole. Their epoch is the shape of a matrix (gemm/problem.h),
// and their op means nothing.
constexpr int kProductRole = kTrackRoles;

// One phase of a track, in ns of the host's steady clock.
struct Span {
  int cta, role;
  uint64_t epoch;
  OpKind op;
  Phase phase;
  int64_t begin_ns, end_ns;
};

// What one rank did in a profile: its tracks one after another, each in order.
struct RankProfile {
  RankId rank_id;
  std::vector<Span> spans;
  uint64_t lost;        // phases that later phases have overwritten
  uint64_t unfinished;  // tracks that were inside an op when the profile ended
};

// The phase that a rank has entered last.
struct Moment {
  OpKind op;
  Phase phase;  // none: between ops
};

// Turns times of a device into times of the host. Between two samples it corrects for the drift of the clocks; outside
// them it assumes no drift.
class HostClock {
 public:
  HostClock(ClockSample begin, ClockSample end) : begin_(begin), end_(end) {}

  int64_t of(uint64_t device_ns) const {
    const int64_t ahead = ahead_at(begin_), drift = ahead_at(end_) - ahead;
    const double whole = static_cast<double>(end_.device_ns - begin_.device_ns);
    const double part = static_cast<double>(static_cast<int64_t>(device_ns - begin_.device_ns));
    const double fraction = whole > 0 ? std::clamp(part / whole, 0.0, 1.0) : 0.0;
    return static_cast<int64_t>(device_ns) - ahead - static_cast<int64_t>(fraction * static_cast<double>(drift));
  }

 private:
  // By how much the device's clock is ahead of the host's, in ns.
  static int64_t ahead_at(ClockSample sample) { return static_cast<int64_t>(sample.device_ns - sample.host_ns); }

  const ClockSample begin_, end_;
};

class Profiler {
 public:
  // For ops of up to `ctas` CTAs. Throws std::runtime_error, as start and stop do.
  Profiler(std::shared_ptr<Group> group, int ctas, const Products& products = {});
  // Products record nothing here any more, even if the profile has not ended.
  ~Profiler();

  // Begins a profile: of the ops that begin from now on, and of the products on the group's devices, unless another
  // group profiles those already.
  void start();
  std::vector<RankProfile> stop();

  // The last event of the first track of a rank of this process, if there is one. May be called while ops run.
  std::optional<Moment> last_of(RankId rank_id) const;

 private:
  struct Rank {
    RankId rank_id;
    int device;
    SignalPad* signal_pad;
    std::vector<uint64_t*> products;  // the words of Products::timelines
    std::size_t track_count;          // the ops', by CTA and role, then the products', by CTA
    Timeline* timelines;              // on the device: of ops, and of products
    Track* tracks;                    // on the device
    std::vector<uint64_t> seen;       // events of each track before the profile
    ClockSample begin;
  };
  void add_rank(RankId rank_id, const Products& products);
  static void switch_products(const Rank& rank, const Timeline* from, const Timeline* to);
  std::vector<Track> read_tracks(const Rank& rank) const;
  RankProfile read(const Rank& rank) const;

  const std::shared_ptr<Group> group_;
  const std::size_t ctas_;
  std::vector<Rank> ranks_;
};

}  // namespace jax_ep
