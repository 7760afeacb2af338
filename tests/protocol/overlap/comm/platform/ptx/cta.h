// Counters by which the threads of a CTA signal each other.
#pragma once

#include <cstdint>

#include "comm/platform.h"

namespace jax_ep::ptx {

inline void count_one(uint32_t* counter) { __atomic_fetch_add(counter, 1, __ATOMIC_RELEASE); }
inline void wait_count(const uint32_t* counter, uint32_t value) {
  for (unsigned tries = 0; load_acquire(counter) < value; ++tries) pause(tries);
}
inline void wait_counts(const uint32_t* counters, int warps, uint32_t value) {
  for (int warp = 0; warp < warps; ++warp) wait_count(&counters[warp], value);
}
inline void sync_some(int barrier, int threads) { cta_barriers->sync(barrier, threads); }

}  // namespace jax_ep::ptx
