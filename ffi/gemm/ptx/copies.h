// Copies by threads from global to shared memory (cp.async).
#pragma once

#include "comm/platform/ptx/mbarrier.h"

namespace jax_ep::gemm {

// Copies 16-byte vector number `vec` after `from`, or zeros, to the shared address `to` + kOffset.
template <int kOffset>
JAX_EP_FN void copy_vector(uint32_t to, const char* from, uint32_t vec, bool zeros) {
  asm volatile(
      "{ .reg .pred zeros; .reg .b64 at; setp.ne.b32 zeros, %3, 0; mad.wide.u32 at, %2, 16, %1; "
      "cp.async.cg.shared.global.L2::256B [%0+%4], [at], 16, zeros; }" ::"r"(to),
      "l"(from), "r"(vec), "r"(int{zeros}), "n"(kOffset)
      : "memory");
}
// Arrives when all copies that this thread has issued have landed.
JAX_EP_FN void arrive_when_copied(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(ptx::shared_address(barrier)) : "memory");
}
JAX_EP_FN void wait_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

}  // namespace jax_ep::gemm
