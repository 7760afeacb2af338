// Hopper's bulk copies between global and shared memory, without registers. On other GPUs they do nothing: check
// kHopper.
#pragma once

#include <cstdint>

#include "comm/platform/ptx/mbarrier.h"

namespace jax_ep::ptx {

// Orders this thread's memory accesses before later bulk copies and wgmma, and the reverse.
JAX_EP_FN void proxy_fence() {
  if constexpr (kHopper) asm volatile("fence.proxy.async;" ::: "memory");
}
// The same only in shared memory, which is far cheaper.
JAX_EP_FN void shared_proxy_fence() {
  if constexpr (kHopper) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Copies 16-byte words from global to shared memory. The barrier counts an arrival, and the bytes as they arrive.
JAX_EP_FN void load(char* to, const char* from, uint32_t bytes, uint64_t* barrier) {
  arrive_expecting(barrier, bytes);
  if constexpr (kHopper)
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}

// Copies from shared to global memory, also a peer's. A thread commits its stores in groups.
JAX_EP_FN void store(char* to, const char* from, uint32_t bytes) {
  if constexpr (kHopper)
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared_address(from)),
                 "r"(bytes)
                 : "memory");
}
JAX_EP_FN void commit_stores() {
  if constexpr (kHopper) asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until all but the latest kPending groups of this thread are read from shared memory, or written.
template <int kPending>
JAX_EP_FN void wait_stores_read() {
  if constexpr (kHopper) asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
template <int kPending>
JAX_EP_FN void wait_stores_written() {
  if constexpr (kHopper) asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// For a number known only at run time: the largest immediate that is not above it.
JAX_EP_FN void wait_stores_written_but(int pending) {
  if (pending >= 6)
    wait_stores_written<6>();
  else if (pending >= 4)
    wait_stores_written<4>();
  else if (pending >= 3)
    wait_stores_written<3>();
  else if (pending >= 2)
    wait_stores_written<2>();
  else if (pending >= 1)
    wait_stores_written<1>();
  else
    wait_stores_written<0>();
}

}  // namespace jax_ep::ptx
