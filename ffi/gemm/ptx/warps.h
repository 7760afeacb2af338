// Registers, barriers and matrix stores of warps and warpgroups.
#pragma once

#include <cstdint>

#include "gemm/ptx/mbarrier.h"

namespace jax_ep::gemm {

// Registers of a thread move between the warpgroups of a block: all four warps call it.
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// The same lane of a warp every time; by this and `uniform` the compiler knows that coordinates need no register each.
__device__ __forceinline__ bool elect_lane() {
  uint32_t chosen;
  asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(chosen));
  return chosen;
}
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(0xffffffff, value, 0); }

// All threads of all blocks of the cluster meet.
__device__ __forceinline__ void sync_cluster() {
  asm volatile("barrier.cluster.arrive.release;\n\tbarrier.cluster.wait.acquire;" ::: "memory");
}

// `threads` of the block meet; barrier 0 is __syncthreads'.
__device__ __forceinline__ void sync_some(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// A count in shared memory by which warps of a block tell others what they did before. The wait is bounded as they are.
__device__ __forceinline__ void count_one(uint32_t* counter) {
  asm volatile("red.release.cta.shared::cta.add.u32 [%0], 1;" ::"r"(shared_address(counter)) : "memory");
}
__device__ __forceinline__ void wait_count(const uint32_t* counter, uint32_t value) {
  for (uint32_t seen = 0;;) {
    asm volatile("ld.acquire.cta.shared::cta.u32 %0, [%1];" : "=r"(seen) : "r"(shared_address(counter)) : "memory");
    if (seen >= value) return;
    __nanosleep(40);
  }
}

// The same of several warps, a counter each, by the lanes of a warp.
__device__ __forceinline__ void wait_counts(const uint32_t* counters, int warps, uint32_t value) {
  if (threadIdx.x % 32 < warps) wait_count(&counters[threadIdx.x % 32], value);
  __syncwarp();
}

// Four 8 x 8 matrices of 16-bit values; lane l names row l % 8 of matrix l / 8.
__device__ __forceinline__ void store_matrices(void* row, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)), "r"(a),
               "r"(b), "r"(c), "r"(d)
               : "memory");
}

}  // namespace jax_ep::gemm
