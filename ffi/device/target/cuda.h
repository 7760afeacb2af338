// NVIDIA GPUs as a target: a team is a warp. Memory order in PTX, at the scope each flag needs.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#define JAX_EP_FN __device__ __forceinline__
#define JAX_EP_CONSTANT_FN __host__ __device__ constexpr
#define JAX_EP_MOVER "device/target/cuda_mover.h"

#include "device/place.h"

namespace jax_ep {

constexpr int kMaxTeams = 1024;
// How long a rank that gives up waits for peers to say that they write no more.
constexpr uint64_t kGraceNs = 300'000'000;
constexpr int kGroupTokens = 8;
constexpr int kLaneValues = 8;

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
// Among the teams of one rank: device scope is enough, and causality carries what they wrote to peers along.
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

JAX_EP_FN uint64_t clock_ns() {
  uint64_t ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return ns;
}

JAX_EP_FN void pause(unsigned) { __nanosleep(20); }

struct Match {
  int below;
  int total;
};

struct Team {
  int index;  // among the teams of this rank
  int count;
  Place pusher, filler;
  int lane;
  char* shared;  // this team's own shared memory
  int shared_bytes;
  static constexpr int lanes = 32;

  JAX_EP_FN void sync() const { __syncwarp(); }
  JAX_EP_FN int broadcast(int value) const { return __shfl_sync(~0u, value, 0); }
  JAX_EP_FN Match match(int value) const {
    const unsigned same = __match_any_sync(~0u, value);
    return {__popc(same & ((1u << lane) - 1)), __popc(same)};
  }
  JAX_EP_FN int sum(int value) const { return __reduce_add_sync(~0u, value); }
  JAX_EP_FN float max(float value) const {
    for (int step = lanes / 2; step; step /= 2) {
      const float other = __shfl_xor_sync(~0u, value, step);
      value = other > value || other != other ? other : value;  // NaN wins
    }
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

// The first warps of every block push, the others fill; `shared_bytes` of dynamic shared memory belong to each.
JAX_EP_FN Team this_team(int pushers_per_block, int shared_bytes) {
  extern __shared__ __align__(128) char shared[];
  const int block = blockIdx.x, blocks = gridDim.x, warp = threadIdx.x / Team::lanes, warps = blockDim.x / Team::lanes;
  return {block * warps + warp,
          blocks * warps,
          pusher_place(block, blocks, warp, pushers_per_block),
          filler_place(block, blocks, warp, warps, pushers_per_block),
          static_cast<int>(threadIdx.x % Team::lanes),
          shared + warp * shared_bytes,
          shared_bytes};
}

}  // namespace jax_ep
