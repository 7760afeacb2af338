// Instructions of warps and warpgroups: registers, an elected lane, and matrix stores.
#pragma once

#include <cstdint>

#include "comm/platform/ptx/mbarrier.h"

namespace jax_ep::gemm {

// Moves registers between the warpgroups of a CTA. All four warps of a warpgroup call.
template <int kRegisters>
JAX_EP_FN void warpgroup_reg_dealloc() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
JAX_EP_FN void warpgroup_reg_alloc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// True on one lane of a warp, always the same one. elect_lane and uniform tell the compiler to keep coordinates in
// uniform registers.
JAX_EP_FN bool elect_lane() {
  uint32_t elected;
  asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(elected));
  return elected;
}
JAX_EP_FN int uniform(int value) { return __shfl_sync(0xffffffff, value, 0); }

// A load that the compiler does not move across the beginning, the end or a wait of multiplies.
JAX_EP_FN float load_here(const float* at) {
  float value;
  asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(value) : "l"(at));
  return value;
}
JAX_EP_FN int load_here(const int32_t* at) {
  int value;
  asm volatile("ld.global.nc.s32 %0, [%1];" : "=r"(value) : "l"(at));
  return value;
}

// Four 8 x 8 matrices of 16-bit values; lane l names row l % 8 of matrix l / 8.
JAX_EP_FN void store_matrices(void* row, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(ptx::shared_address(row)),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}
// Transposed: column i of a matrix becomes the row whose address lane i gives.
JAX_EP_FN void store_transposed(void* row, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(ptx::shared_address(row)),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

}  // namespace jax_ep::gemm
