// The only spinning. A wait ends by its flag, by the group's abort word or by its deadline, and says which.
#pragma once

#include "device/platform.h"

namespace jax_ep {

enum class Status : int { ok, timeout, aborted };

// Waits until *flag is at least `value`. Polls without ordering, which would cost the other teams their caches, and
// orders once at the end: or at once, if nothing is to be waited for.
JAX_EP_FN Status spin_until(const uint64_t* flag, uint64_t value, const uint64_t* abort_word, uint64_t deadline_ns) {
  if (load_acquire(flag) >= value) return Status::ok;
  for (unsigned tries = 0;; ++tries) {
    const uint64_t seen = load_relaxed(flag), lost = load_relaxed(abort_word);  // both on their way at once
    if (seen >= value) {
      load_acquire(flag);
      return Status::ok;
    }
    if (lost) return Status::aborted;
    if (tries % 64 == 63 && clock_ns() > deadline_ns) return Status::timeout;
    pause(tries);
  }
}

}  // namespace jax_ep
