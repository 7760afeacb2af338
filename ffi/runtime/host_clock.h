// Times of a device in those of the host.
#pragma once

#include <algorithm>
#include <cstdint>

#include "runtime/memory.h"

namespace jax_ep {

// Between two samples, as the clocks drift apart; outside them, as if they did not.
class HostClock {
 public:
  HostClock(ClockSample begin, ClockSample end) : begin_(begin), end_(end) {}

  int64_t of(uint64_t device_ns) const {
    const int64_t ahead = ahead_at(begin_), drift = ahead_at(end_) - ahead;
    const double whole = static_cast<double>(end_.device_ns - begin_.device_ns);
    const double part = static_cast<double>(static_cast<int64_t>(device_ns - begin_.device_ns));
    const double share = whole > 0 ? std::clamp(part / whole, 0.0, 1.0) : 0.0;
    return static_cast<int64_t>(device_ns) - ahead - static_cast<int64_t>(share * static_cast<double>(drift));
  }

 private:
  // By how much the device's clock is ahead of the host's, in ns.
  static int64_t ahead_at(ClockSample sample) { return static_cast<int64_t>(sample.device_ns - sample.host_ns); }

  const ClockSample begin_, end_;
};

}  // namespace jax_ep
