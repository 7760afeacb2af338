// Copies between global and shared memory: of boxes by TMA, which complete like other bulk copies, and by threads
// (cp.async).
#pragma once

#include <cuda.h>

#include "comm/platform/ptx/bulk.h"

namespace jax_ep::gemm {

// Where a box starts, in elements: along the contiguous dimension, along the rows, and which matrix.
struct Corner {
  int inner, outer, matrix;
};

JAX_EP_FN void load_box(void* to, const CUtensorMap& map, const Corner& at, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
      "[%2];" ::"r"(ptx::shared_address(to)),
      "l"(&map), "r"(ptx::shared_address(barrier)), "r"(at.inner), "r"(at.outer), "r"(at.matrix)
      : "memory");
}
// Loads data that is not read again: the L2 cache evicts it first. The constant is createpolicy's L2::evict_first.
JAX_EP_FN void load_box_once(void* to, const CUtensorMap& map, const Corner& at, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1, {%3, %4, %5}], [%2], %6;" ::"r"(ptx::shared_address(to)),
      "l"(&map), "r"(ptx::shared_address(barrier)), "r"(at.inner), "r"(at.outer), "r"(at.matrix),
      "l"(0x12f0000000000000)
      : "memory");
}
// Loads to the same address in each CTA of the cluster whose bit is in `peers`. The barrier of each CTA counts the
// bytes.
JAX_EP_FN void load_box_to(uint16_t peers, void* to, const CUtensorMap& map, const Corner& at, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%4, %5, %6}], [%2], %3;" ::"r"(ptx::shared_address(to)),
      "l"(&map), "r"(ptx::shared_address(barrier)), "h"(peers), "r"(at.inner), "r"(at.outer), "r"(at.matrix)
      : "memory");
}

JAX_EP_FN void store_box(const CUtensorMap& map, const Corner& at, const void* from) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(&map),
               "r"(ptx::shared_address(from)), "r"(at.inner), "r"(at.outer), "r"(at.matrix)
               : "memory");
}

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
