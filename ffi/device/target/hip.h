// AMD GPUs as a target: a team is a wavefront. Memory order by clang's scoped atomics.
#pragma once

#include <hip/hip_runtime.h>

#include <cstdint>

#define JAX_EP_FN __device__ inline __attribute__((always_inline))
#define JAX_EP_CONSTANT_FN __host__ __device__ constexpr
#define JAX_EP_MOVER "device/target/plain_mover.h"

#include "device/place.h"

namespace jax_ep {

constexpr int kMaxTeams = 1024;
// How long a rank that gives up waits for peers to say that they write no more.
constexpr uint64_t kGraceNs = 300'000'000;
constexpr int kGroupTokens = 8;
constexpr int kLaneValues = 8;

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
JAX_EP_FN uint64_t fetch_add(uint64_t* p, uint64_t value) {
  return __hip_atomic_fetch_add(p, value, __ATOMIC_ACQ_REL, __HIP_MEMORY_SCOPE_AGENT);
}
JAX_EP_FN bool compare_exchange(uint64_t* p, uint64_t expected, uint64_t desired) {
  return __hip_atomic_compare_exchange_strong(p, &expected, desired, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE,
                                              __HIP_MEMORY_SCOPE_SYSTEM);
}

// The constant 100 MHz counter.
JAX_EP_FN uint64_t clock_ns() { return __builtin_readsteadycounter() * 10; }

JAX_EP_FN void pause(unsigned) { __builtin_amdgcn_s_sleep(1); }

struct Match {
  int below;
  int total;
};

struct Team {
  int index;  // among the teams of this rank
  int count;
  Place pusher, filler;
  int lane;
  static constexpr int lanes = 64;

  JAX_EP_FN void sync() const {
    __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "wavefront");
    __builtin_amdgcn_wave_barrier();
  }
  JAX_EP_FN int broadcast(int value) const { return __builtin_amdgcn_readfirstlane(value); }
  JAX_EP_FN Match match(int value) const {
    uint64_t same = 0;
    for (bool todo = true; todo;) {  // one round per distinct value: the first lane left names it
      const int candidate = __builtin_amdgcn_readfirstlane(value);
      const uint64_t holders = __builtin_amdgcn_ballot_w64(value == candidate);
      if (value == candidate) {
        same = holders;
        todo = false;
      }
    }
    return {__builtin_popcountll(same & ((1ull << lane) - 1)), __builtin_popcountll(same)};
  }
  JAX_EP_FN int from_lane(int value, int source) const { return __builtin_amdgcn_ds_bpermute(source * 4, value); }
  JAX_EP_FN int sum(int value) const {
    for (int step = lanes / 2; step; step /= 2) value += from_lane(value, lane ^ step);
    return value;
  }
  JAX_EP_FN float max(float value) const {
    for (int step = lanes / 2; step; step /= 2) {
      const float other = __builtin_bit_cast(float, from_lane(__builtin_bit_cast(int, value), lane ^ step));
      value = other > value || other != other ? other : value;  // NaN wins
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

// The first wavefronts of every block push, the others fill.
JAX_EP_FN Team this_team(int pushers_per_block, int) {
  const int thread = __builtin_amdgcn_workitem_id_x(), threads = __builtin_amdgcn_workgroup_size_x();
  const int block = __builtin_amdgcn_workgroup_id_x(), blocks = __builtin_amdgcn_grid_size_x() / threads;
  const int wave = thread / Team::lanes, waves = threads / Team::lanes;
  return {block * waves + wave, blocks * waves, pusher_place(block, blocks, wave, pushers_per_block),
          filler_place(block, blocks, wave, waves, pushers_per_block), thread % Team::lanes};
}

}  // namespace jax_ep
