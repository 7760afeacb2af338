// Barriers in a CTA's shared memory. They count arrivals and bytes. Bulk copies arrive when they are done.
#pragma once

#include <cstdint>

#include "comm/platform.h"

namespace jax_ep::ptx {

JAX_EP_FN uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// One thread calls, before any other uses the barrier. ptxas schedules the code differently for `arrivals`, an operand,
// and kArrivals, an immediate.
JAX_EP_FN void init_barrier(uint64_t* barrier, int arrivals) {
  if constexpr (kHopper)
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
template <int kArrivals>
JAX_EP_FN void init_barrier(uint64_t* barrier) {
  if constexpr (kHopper)
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "n"(kArrivals) : "memory");
}
// Makes initialised barriers visible to the cluster and to bulk copies.
JAX_EP_FN void publish_barriers() {
  if constexpr (kHopper) asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

JAX_EP_FN void arrive(uint64_t* barrier) {
  if constexpr (kHopper)
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// Arrives, and makes the phase also wait for this many bytes.
JAX_EP_FN void arrive_expecting(uint64_t* barrier, uint32_t bytes) {
  if constexpr (kHopper)
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}

// Whether the phase of this parity has ended. The hardware may suspend the thread before it returns false.
JAX_EP_FN bool has_passed(uint64_t* barrier, uint32_t parity) {
  uint32_t done = 1;
  if constexpr (kHopper)
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(shared_address(barrier)), "r"(parity)
                 : "memory");
  return done;
}
// Waits for the phase of this parity to end. Threads of this cluster and copies end it, so the wait is bounded.
JAX_EP_FN void wait_barrier(uint64_t* barrier, uint32_t parity) {
  while (!has_passed(barrier, parity)) {
  }
}

}  // namespace jax_ep::ptx
