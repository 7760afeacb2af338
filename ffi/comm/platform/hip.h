// AMD GPUs: a coop is a wavefront. Clang's scoped atomics order memory.
#pragma once

#include <hip/hip_runtime.h>

#include <cstdint>

#define JAX_EP_FN __device__ inline __attribute__((always_inline))
#define JAX_EP_COLD_FN __device__ inline __attribute__((noinline))
#define JAX_EP_CONSTANT_FN __host__ __device__ constexpr
#define JAX_EP_ROLLED _Pragma("unroll 1")

#include "comm/part.h"

namespace jax_ep {

// Packs of a row that a lane has in flight. Never timed.
constexpr int kLanePacks = 4, kRowPacks = 4;

JAX_EP_FN uint64_t load_relaxed(const uint64_t* p) {
  return __hip_atomic_load(p, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
}
JAX_EP_FN void store_relaxed(uint64_t* p, uint64_t value) {
  __hip_atomic_store(p, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
}
JAX_EP_FN uint64_t load_acquire(const uint64_t* p) {
  return __hip_atomic_load(p, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_SYSTEM);
}
JAX_EP_FN void store_release(uint64_t* p, uint64_t value) {
  __hip_atomic_store(p, value, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_SYSTEM);
}
JAX_EP_FN void store_release_here(uint64_t* p, uint64_t value) {
  __hip_atomic_store(p, value, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_AGENT);
}
JAX_EP_FN uint64_t fetch_add(uint64_t* p, uint64_t value) {
  return __hip_atomic_fetch_add(p, value, __ATOMIC_ACQ_REL, __HIP_MEMORY_SCOPE_AGENT);
}
JAX_EP_FN bool compare_exchange(uint64_t* p, uint64_t expected, uint64_t desired) {
  return __hip_atomic_compare_exchange_strong(p, &expected, desired, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE,
                                              __HIP_MEMORY_SCOPE_SYSTEM);
}

JAX_EP_FN uint64_t draw(uint64_t* numbers) {
  return __hip_atomic_fetch_add(numbers, uint64_t{1}, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
// Relaxed atomics among the coops of one rank. Those with a result return the value before.
JAX_EP_FN int32_t atomic_add(int32_t* p, int32_t value) {
  return __hip_atomic_fetch_add(p, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
JAX_EP_FN void atomic_add(uint64_t* p, uint64_t value) {
  __hip_atomic_fetch_add(p, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
template <class T>
JAX_EP_FN T atomic_exchange(T* p, T value) {
  return __hip_atomic_exchange(p, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
JAX_EP_FN void atomic_min(int32_t* p, int32_t value) {
  __hip_atomic_fetch_min(p, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
JAX_EP_FN void atomic_or(uint32_t* p, uint32_t bits) {
  __hip_atomic_fetch_or(p, bits, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}

// The constant 100 MHz counter.
JAX_EP_FN uint64_t clock_ns() { return __builtin_readsteadycounter() * 10; }

JAX_EP_FN void pause(unsigned) { __builtin_amdgcn_s_sleep(1); }

JAX_EP_FN int count_bits(uint64_t bits) { return __builtin_popcountll(bits); }
JAX_EP_FN int lowest_bit(uint64_t bits) { return __builtin_ctzll(bits); }

struct Coop {
  int index;  // among the coops of this rank
  int count;
  Part sender, receiver;
  Part cta, in_cta;  // the CTA, and this coop in it
  int lane;
  char* shared;  // this coop's own shared memory
  int shared_bytes;
  TrackRole track;
  static constexpr int lanes = 64;

  JAX_EP_FN void sync() const {
    __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "wavefront");
    __builtin_amdgcn_wave_barrier();
  }
  JAX_EP_FN void cta_sync() const {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
  }
  JAX_EP_FN uint64_t ballot(bool value) const { return __builtin_amdgcn_ballot_w64(value); }
  JAX_EP_FN int broadcast(int value) const { return __builtin_amdgcn_readfirstlane(value); }
  JAX_EP_FN Match match(int value) const {
    uint64_t same = 0;
    for (bool todo = true; todo;) {  // one round per distinct value
      const int candidate = __builtin_amdgcn_readfirstlane(value);
      const uint64_t holders = __builtin_amdgcn_ballot_w64(value == candidate);
      if (value == candidate) {
        same = holders;
        todo = false;
      }
    }
    return {__builtin_popcountll(same & ((1ull << lane) - 1)), __builtin_popcountll(same)};
  }
  template <class V>
  JAX_EP_FN V from_lane(V value, int source) const {
    static_assert(sizeof(V) % sizeof(int) == 0);
    int words[sizeof(V) / sizeof(int)];
    __builtin_memcpy(words, &value, sizeof(V));
    for (int& word : words) word = __builtin_amdgcn_ds_bpermute(source * 4, word);
    __builtin_memcpy(&value, words, sizeof(V));
    return value;
  }
  JAX_EP_FN int sum(int value) const {
    for (int step = lanes / 2; step; step /= 2) value += from_lane(value, lane ^ step);
    return value;
  }
  JAX_EP_FN uint32_t max(uint32_t value, int width) const {
    for (int step = width / 2; step; step /= 2) {
      const uint32_t other = from_lane(value, lane ^ step);
      value = other > value ? other : value;
    }
    return value;
  }
  JAX_EP_FN int exclusive_scan(int value, int* total) const {
    int inclusive = value;
    for (int step = 1; step < lanes; step *= 2) {
      const int other = from_lane(inclusive, lane - step);
      if (lane >= step) inclusive += other;
    }
    *total = from_lane(inclusive, lanes - 1);
    return inclusive - value;
  }
};

// The first coops of every CTA send, the others receive. Each has `shared_bytes` of dynamic shared memory.
JAX_EP_FN Coop this_coop(int senders_per_cta, int shared_bytes) {
  extern __shared__ __attribute__((aligned(128))) char shared[];
  const int thread = __builtin_amdgcn_workitem_id_x(), threads = __builtin_amdgcn_workgroup_size_x();
  const int cta = __builtin_amdgcn_workgroup_id_x(), ctas = __builtin_amdgcn_grid_size_x() / threads;
  const int coop = thread / Coop::lanes, coops = threads / Coop::lanes, lane = thread % Coop::lanes;
  return {cta * coops + coop,
          ctas * coops,
          sender_part(cta, ctas, coop, senders_per_cta),
          receiver_part(cta, ctas, coop, coops, senders_per_cta),
          {cta, ctas},
          {coop, coops},
          lane,
          shared + coop * shared_bytes,
          shared_bytes,
          track_of(coop, senders_per_cta)};
}

}  // namespace jax_ep
