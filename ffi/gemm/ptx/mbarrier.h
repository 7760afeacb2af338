// Barriers in shared memory that count arrivals and bytes, also those of a peer in the cluster.
#pragma once

#include <cstdint>
#include <cstdio>

namespace jax_ep::gemm {

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void init_barrier(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
// Makes initialised barriers visible to the cluster and to TMA.
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void arrive_expecting(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// Arrives at the barrier that lies at this place in block `peer` of the cluster.
__device__ __forceinline__ void arrive_at_peer(uint64_t* barrier, int peer) {
  asm volatile(
      "{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::
          "r"(shared_address(barrier)),
      "r"(peer)
      : "memory");
}

__device__ __forceinline__ bool has_passed(uint64_t* barrier, uint32_t parity) {
  uint32_t done;
  asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
               : "=r"(done)
               : "r"(shared_address(barrier)), "r"(parity)
               : "memory");
  return done;
}

// Waits for the phase of this parity to end. Every arrival comes from the same cluster, so the wait is bounded; a debug
// build reports a protocol error instead of hanging, and is slow: ptxas runs wgmma one by one around a call.
__device__ __forceinline__ void wait_barrier(uint64_t* barrier, uint32_t parity, [[maybe_unused]] const char* what) {
#ifdef JAX_EP_GEMM_DEBUG
  const long long start = clock64();
  while (!has_passed(barrier, parity)) {
    if (clock64() - start < 4'000'000'000LL) continue;
    std::printf("gemm: block %d thread %d waits for %s, parity %u\n", blockIdx.x, threadIdx.x, what, parity);
    __trap();
  }
#else
  while (!has_passed(barrier, parity)) {
  }
#endif
}

// The two for data that one block of the cluster leaves in the memory of another.
__device__ __forceinline__ void arrive_with_data(uint64_t* barrier, int peer) {
  asm volatile(
      "{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; "
      "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [there]; }" ::"r"(shared_address(barrier)),
      "r"(peer)
      : "memory");
}
__device__ __forceinline__ void wait_for_data(uint64_t* barrier, uint32_t parity) {
  uint32_t done = 0;
  while (!done)
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
}

// To the place of block `peer` of the cluster that is `to` here.
__device__ __forceinline__ void store_at_peer(float4* to, int peer, float4 value) {
  asm volatile(
      "{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; "
      "st.shared::cluster.v4.f32 [there], {%2, %3, %4, %5}; }" ::"r"(shared_address(to)),
      "r"(peer), "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w)
      : "memory");
}

}  // namespace jax_ep::gemm
