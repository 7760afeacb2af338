// Counters by which warps of a CTA signal each other.
#pragma once

#include <cstdint>

#include "comm/platform/ptx/mbarrier.h"

namespace jax_ep::ptx {

JAX_EP_FN void count_one(uint32_t* counter) {
  asm volatile("red.release.cta.shared::cta.add.u32 [%0], 1;" ::"r"(shared_address(counter)) : "memory");
}
JAX_EP_FN void wait_count(const uint32_t* counter, uint32_t value) {
  for (uint32_t seen = 0;;) {
    asm volatile("ld.acquire.cta.shared::cta.u32 %0, [%1];" : "=r"(seen) : "r"(shared_address(counter)) : "memory");
    if (seen >= value) return;
    __nanosleep(40);
  }
}

// Waits for the counters of several warps. All lanes of a warp call together.
JAX_EP_FN void wait_counts(const uint32_t* counters, int warps, uint32_t value) {
  if (threadIdx.x % 32 < warps) wait_count(&counters[threadIdx.x % 32], value);
  __syncwarp();
}

}  // namespace jax_ep::ptx
