// Waiting for a flag. A wait ends by its flag, by the group's abort word or by its deadline.
#pragma once

#include "comm/platform.h"

namespace jax_ep {

enum class Status : int { ok, timeout, aborted, mismatch, failed };  // failed: another lane has reported the failure

struct Waited {
  Status status;
  uint64_t seen;  // the flag's last value
  uint64_t ns;    // how long the wait took; 0 for a short one
};

// If this much time passes between two readings of the clock, the waiter was suspended, perhaps with all its peers.
constexpr uint64_t kStoppedNs = 1'000'000'000;

constexpr unsigned kShortWait = 64;  // reads of the flag before the first reading of the clock

JAX_EP_COLD_FN Waited spin_long(const uint64_t* flag, uint64_t value, const uint64_t* abort_word, uint64_t timeout_ns) {
  uint64_t began = clock_ns(), looked = began;
  for (unsigned tries = 1;; ++tries) {
    const uint64_t seen = load_relaxed(flag), lost = load_relaxed(abort_word);  // both loads in flight
    if (seen >= value) return {Status::ok, load_acquire(flag), looked - began};
    if (lost) return {Status::aborted, seen, looked - began};
    if (tries % kShortWait == 0) {
      const uint64_t now = clock_ns();
      if (now - looked > kStoppedNs) began += now - looked;
      looked = now;
      if (now - began > timeout_ns) return {Status::timeout, seen, now - began};
    }
    pause(tries);
  }
}

// Waits until *flag is at least `value`, for at most `timeout_ns` in which this waiter runs. Polls with relaxed loads,
// because acquire loads would invalidate the caches of the other coops. One acquire at the end orders later reads. Its
// value is unused, so no instruction waits for it.
JAX_EP_FN Waited spin_until(const uint64_t* flag, uint64_t value, const uint64_t* abort_word, uint64_t timeout_ns) {
  uint64_t seen = load_acquire(flag);
  if (seen >= value) return {Status::ok, seen, 0};
  for (unsigned tries = 0;; ++tries) {
    seen = load_relaxed(flag);
    const uint64_t lost = load_relaxed(abort_word);
    if (seen >= value) {
      load_acquire(flag);
      return {Status::ok, seen, 0};
    }
    if (lost || tries == kShortWait) return spin_long(flag, value, abort_word, timeout_ns);
    pause(tries);
  }
}

}  // namespace jax_ep
