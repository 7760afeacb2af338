// Thin wrappers of Hopper's bulk copies: global memory to shared memory and on, without registers.
#pragma once

#include <cstdint>

#include "comm/layout.h"

namespace jax_ep::bulk {

// Of a RowReader, then of a RowMover.
constexpr int kReaderBarriers = 12, kMoverBarriers = 3;
static_assert((kReaderBarriers + kMoverBarriers) * sizeof(uint64_t) <= kBarrierBytes);

JAX_EP_FN uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

#if JAX_EP_BULK_COPIES
constexpr bool kAvailable = true;

JAX_EP_FN void init_barrier(uint64_t* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Orders what threads wrote to memory with what bulk copies read, and the reverse.
JAX_EP_FN void proxy_fence() { asm volatile("fence.proxy.async;" ::: "memory"); }
// The same for shared memory alone, which is far cheaper.
JAX_EP_FN void shared_proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

JAX_EP_FN void load(char* to, const char* from, uint32_t bytes, uint64_t* barrier) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}
JAX_EP_FN void wait_load(uint64_t* barrier, uint32_t parity) {
  uint32_t done = 0;
  while (!done)
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(shared_address(barrier)), "r"(parity)
                 : "memory");
}

JAX_EP_FN void store(char* to, const char* from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared_address(from)),
               "r"(bytes)
               : "memory");
}
JAX_EP_FN void commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Until all but the latest kPending groups have been read from shared memory, or are written altogether.
template <int kPending>
JAX_EP_FN void wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
template <int kPending>
JAX_EP_FN void wait_written() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}
#else  // the same names, never called
constexpr bool kAvailable = false;
JAX_EP_FN void init_barrier(uint64_t*) {}
JAX_EP_FN void proxy_fence() {}
JAX_EP_FN void shared_proxy_fence() {}
JAX_EP_FN void load(char*, const char*, uint32_t, uint64_t*) {}
JAX_EP_FN void wait_load(uint64_t*, uint32_t) {}
JAX_EP_FN void store(char*, const char*, uint32_t) {}
JAX_EP_FN void commit() {}
template <int kPending>
JAX_EP_FN void wait_read() {}
template <int kPending>
JAX_EP_FN void wait_written() {}
#endif

// The same for a number of groups known only at run time, of which the nearest smaller immediate is waited for.
JAX_EP_FN void wait_written_but(int pending) {
  if (pending >= 6)
    wait_written<6>();
  else if (pending >= 4)
    wait_written<4>();
  else if (pending >= 3)
    wait_written<3>();
  else if (pending >= 2)
    wait_written<2>();
  else if (pending >= 1)
    wait_written<1>();
  else
    wait_written<0>();
}

}  // namespace jax_ep::bulk
