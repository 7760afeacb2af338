// NVIDIA GPUs: a coop is a warp. PTX orders memory, at the scope that each flag needs.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#define JAX_EP_FN __device__ __forceinline__
#ifndef JAX_EP_COLD_FN  // kernels with wgmma have no registers for calls
#define JAX_EP_COLD_FN inline __device__ __noinline__
#endif
#define JAX_EP_CONSTANT_FN __host__ __device__ constexpr
#define JAX_EP_ROLLED _Pragma("unroll 1")

#include "comm/part.h"

namespace jax_ep {

// Packs of a row that a lane has in flight, chosen by kernels_bench 2. kRowPacks of all lanes are half a row of 7168
// 16-bit values.
constexpr int kLanePacks = 8, kRowPacks = 14;

JAX_EP_FN uint64_t load_relaxed(const uint64_t* p) {
  uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(p) : "memory");
  return value;
}
JAX_EP_FN void store_relaxed(uint64_t* p, uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(value) : "memory");
}
JAX_EP_FN uint64_t load_acquire(const uint64_t* p) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(p) : "memory");
  return value;
}
JAX_EP_FN void store_release(uint64_t* p, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(value) : "memory");
}
// Releases only to the coops of this rank, so device scope is enough.
JAX_EP_FN void store_release_here(uint64_t* p, uint64_t value) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(value) : "memory");
}
// Device scope is enough here, because causality also orders what the coops wrote to peers.
JAX_EP_FN uint64_t fetch_add(uint64_t* p, uint64_t value) {
  uint64_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], %2;" : "=l"(before) : "l"(p), "l"(value) : "memory");
  return before;
}
JAX_EP_FN bool compare_exchange(uint64_t* p, uint64_t expected, uint64_t desired) {
  uint64_t before;
  asm volatile("atom.acq_rel.sys.global.cas.b64 %0, [%1], %2, %3;"
               : "=l"(before)
               : "l"(p), "l"(expected), "l"(desired)
               : "memory");
  return before == expected;
}

// The next number, without memory order. The compiler would aggregate an atomic add over the lanes and wait for its
// result. It leaves atom.inc as it is.
JAX_EP_FN uint64_t draw(uint64_t* numbers) {
  uint32_t before;
  asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(numbers), "r"(~0u) : "memory");
  return before;
}
// Relaxed atomics among the coops of one rank. Those with a result return the value before.
JAX_EP_FN int32_t atomic_add(int32_t* p, int32_t value) { return atomicAdd(p, value); }
JAX_EP_FN void atomic_add(uint64_t* p, uint64_t value) {
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(p), "l"(value) : "memory");
}
JAX_EP_FN int32_t atomic_exchange(int32_t* p, int32_t value) { return atomicExch(p, value); }
JAX_EP_FN uint64_t atomic_exchange(uint64_t* p, uint64_t value) {
  uint64_t before;
  asm volatile("atom.relaxed.gpu.global.exch.b64 %0, [%1], %2;" : "=l"(before) : "l"(p), "l"(value) : "memory");
  return before;
}
JAX_EP_FN void atomic_min(int32_t* p, int32_t value) { atomicMin(p, value); }
JAX_EP_FN void atomic_or(uint32_t* p, uint32_t bits) { atomicOr(p, bits); }

JAX_EP_FN uint64_t clock_ns() {
  uint64_t ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return ns;
}

JAX_EP_FN void pause(unsigned) { __nanosleep(20); }

JAX_EP_FN int count_bits(uint64_t bits) { return __popcll(bits); }
JAX_EP_FN int lowest_bit(uint64_t bits) { return __ffsll(static_cast<long long>(bits)) - 1; }
JAX_EP_FN int count_bits(uint32_t bits) { return __popc(bits); }
JAX_EP_FN int lowest_bit(uint32_t bits) { return __ffs(static_cast<int>(bits)) - 1; }

namespace ptx {
// A barrier of `threads` of the CTA. __syncthreads uses barrier 0.
JAX_EP_FN void sync_some(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
}  // namespace ptx

struct Coop {
  int index;  // among the coops of this rank
  int count;
  Part sender, receiver;
  Part cta, in_cta;  // the CTA, and this coop in it
  int lane;
  char* shared;  // this coop's own shared memory
  int shared_bytes;
  TrackRole track;
  int barrier;  // named barrier of the coops in its CTA that run the op
  static constexpr int lanes = 32;

  JAX_EP_FN void sync() const { __syncwarp(); }
  JAX_EP_FN void cta_sync() const { ptx::sync_some(barrier, in_cta.count * lanes); }
  JAX_EP_FN uint64_t ballot(bool value) const { return __ballot_sync(~0u, value); }
  template <class V>
  JAX_EP_FN V from_lane(V value, int source) const {
    static_assert(sizeof(V) % sizeof(int) == 0);
    int words[sizeof(V) / sizeof(int)];
    memcpy(words, &value, sizeof(V));
    for (int& word : words) word = __shfl_sync(~0u, word, source);
    memcpy(&value, words, sizeof(V));
    return value;
  }
  JAX_EP_FN int broadcast(int value) const { return __shfl_sync(~0u, value, 0); }
  JAX_EP_FN Match match(int value) const {
    const unsigned same = __match_any_sync(~0u, value);
    return {__popc(same & ((1u << lane) - 1)), __popc(same)};
  }
  JAX_EP_FN int sum(int value) const { return __reduce_add_sync(~0u, value); }
  JAX_EP_FN uint32_t max(uint32_t value, int width) const {
    for (int step = width / 2; step; step /= 2) value = ::max(value, __shfl_xor_sync(~0u, value, step));
    return value;
  }
  JAX_EP_FN int exclusive_scan(int value, int* total) const {
    int inclusive = value;
    for (int step = 1; step < lanes; step *= 2) {
      const int other = __shfl_up_sync(~0u, inclusive, step);
      if (lane >= step) inclusive += other;
    }
    *total = __shfl_sync(~0u, inclusive, lanes - 1);
    return inclusive - value;
  }
};

constexpr int kCtaBarrier = 1;  // of all coops of a CTA

// The first coops of every CTA send, the others receive. Each has `shared_bytes` of dynamic shared memory.
JAX_EP_FN Coop this_coop(int senders_per_cta, int shared_bytes) {
  extern __shared__ __attribute__((aligned(128))) char shared[];
  const int cta = blockIdx.x, ctas = gridDim.x, coop = threadIdx.x / Coop::lanes, coops = blockDim.x / Coop::lanes;
  const int lane = threadIdx.x % Coop::lanes;
  return {cta * coops + coop,
          ctas * coops,
          sender_part(cta, ctas, coop, senders_per_cta),
          receiver_part(cta, ctas, coop, coops, senders_per_cta),
          {cta, ctas},
          {coop, coops},
          lane,
          shared + coop * shared_bytes,
          shared_bytes,
          track_of(coop, senders_per_cta),
          kCtaBarrier};
}

}  // namespace jax_ep
