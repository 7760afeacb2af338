// Barriers between the CTAs of a cluster, and writes into each other's shared memory.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstring>

#include "comm/platform/ptx/mbarrier.h"

namespace jax_ep::gemm {

JAX_EP_FN void sync_cluster() {
  asm volatile("barrier.cluster.arrive.release;\n\tbarrier.cluster.wait.acquire;" ::: "memory");
}

// Arrives at the barrier at this address in CTA `peer` of the cluster.
JAX_EP_FN void arrive_at_peer(uint64_t* barrier, int peer) {
  asm volatile(
      "{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::
          "r"(ptx::shared_address(barrier)),
      "r"(peer)
      : "memory");
}

// Waits for the phase of this parity to end. Every arrival comes from the same cluster, so the wait is bounded. A debug
// build reports a protocol error instead of hanging. It is slow, because ptxas serializes wgmma around a call.
JAX_EP_FN void wait_barrier(uint64_t* barrier, uint32_t parity, [[maybe_unused]] const char* what) {
#ifdef JAX_EP_GEMM_DEBUG
  const long long start = clock64();
  while (!ptx::has_passed(barrier, parity)) {
    if (clock64() - start < 4'000'000'000LL) continue;
    std::printf("gemm: CTA %d thread %d waits for %s, parity %u\n", blockIdx.x, threadIdx.x, what, parity);
    __trap();
  }
#else
  ptx::wait_barrier(barrier, parity);
#endif
}

// As arrive_at_peer() and wait_barrier(), with release and acquire at cluster scope, for data written into the other
// CTA.
JAX_EP_FN void arrive_with_data(uint64_t* barrier, int peer) {
  asm volatile(
      "{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; "
      "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [there]; }" ::"r"(ptx::shared_address(barrier)),
      "r"(peer)
      : "memory");
}
JAX_EP_FN void wait_for_data(uint64_t* barrier, uint32_t parity) {
  uint32_t done = 0;
  while (!done)
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(ptx::shared_address(barrier)), "r"(parity)
        : "memory");
}

// Stores to the address in CTA `peer` of the cluster that is `to` here.
JAX_EP_FN void store_at_peer(float4* to, int peer, float4 value) {
  asm volatile(
      "{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; "
      "st.shared::cluster.v4.f32 [there], {%2, %3, %4, %5}; }" ::"r"(ptx::shared_address(to)),
      "r"(peer), "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w)
      : "memory");
}

// Stores a value at `to` in CTA `peer`, and completes a phase of `barrier` there, which counts one arrival.
template <class Value>
JAX_EP_FN void send_value(Value* to, int peer, const Value& value, uint64_t* barrier) {
  static_assert(sizeof(Value) == 32 && alignof(Value) == 16);
  uint32_t x[8];
  memcpy(x, &value, sizeof(value));
  asm volatile(
      "{ .reg .b32 there, bar; mapa.shared::cluster.u32 there, %0, %1; mapa.shared::cluster.u32 bar, %2, %1; "
      "mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [bar], 32; "
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [there], {%3, %4, %5, %6}, [bar]; "
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [there + 16], {%7, %8, %9, %10}, [bar]; }" ::"r"(
          ptx::shared_address(to)),
      "r"(peer), "r"(ptx::shared_address(barrier)), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(x[4]), "r"(x[5]),
      "r"(x[6]), "r"(x[7])
      : "memory");
}

}  // namespace jax_ep::gemm
