// The only spinning. A wait ends by its condition, by the group's abort word or by its deadline, and says which.
#pragma once

#include "device/platform.h"

namespace jax_ep {

enum class Status : int { ok, timeout, aborted };

template <class Done>
JAX_EP_FN Status spin_until(Done done, const uint64_t* abort_word, uint64_t deadline_ns) {
  for (unsigned tries = 0;; ++tries) {
    if (done()) return Status::ok;
    if (load_relaxed(abort_word)) return Status::aborted;
    if (tries % 64 == 63 && clock_ns() > deadline_ns) return Status::timeout;
    pause(tries);
  }
}

}  // namespace jax_ep
