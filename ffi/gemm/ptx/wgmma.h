// Warpgroup matrix multiply: D (registers, float32) += A x B, 16- or 8-bit tiles in shared memory with descriptors.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <type_traits>

#include "comm/dtype.h"

namespace jax_ep::gemm {

// Orders accesses of the accumulators and of shared memory by threads before the next multiply.
JAX_EP_FN void begin_multiplies() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
JAX_EP_FN void commit_multiplies() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most kPending committed groups still run.
template <int kPending>
JAX_EP_FN void wait_multiplies() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// The accumulators of a thread are an array of floats, or one for each slab of a tile.
template <class Sums, class Visit>
JAX_EP_FN void for_each_sum(Sums& d, Visit visit) {
#pragma unroll
  for (auto& each : d)
    if constexpr (std::rank_v<Sums> > 1)
      for_each_sum(each, visit);
    else
      visit(each);
}
template <class Sums>
JAX_EP_FN void set_zero(Sums& d) {
  for_each_sum(d, [](float& sum) { sum = 0; });
}
// Keeps accesses of the accumulators on their side of the asynchronous multiplies.
template <class Sums>
JAX_EP_FN void settle(Sums& d) {
  for_each_sum(d, [](float& sum) { asm volatile("" : "+f"(sum)::"memory"); });
}
// For a first multiply that does not add: otherwise the compiler would keep the old values.
template <class Sums>
JAX_EP_FN void leave_undefined(Sums& d) {
  for_each_sum(d, [](float& sum) { asm volatile("" : "=f"(sum)); });
}

#define JAX_EP_REGISTERS_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define JAX_EP_REGISTERS_16 JAX_EP_REGISTERS_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define JAX_EP_REGISTERS_24 JAX_EP_REGISTERS_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define JAX_EP_REGISTERS_32 JAX_EP_REGISTERS_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define JAX_EP_REGISTERS_40 JAX_EP_REGISTERS_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define JAX_EP_REGISTERS_48 JAX_EP_REGISTERS_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define JAX_EP_REGISTERS_56 JAX_EP_REGISTERS_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define JAX_EP_REGISTERS_64 JAX_EP_REGISTERS_56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define JAX_EP_REGISTERS_72 JAX_EP_REGISTERS_64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define JAX_EP_REGISTERS_80 JAX_EP_REGISTERS_72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define JAX_EP_REGISTERS_88 JAX_EP_REGISTERS_80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define JAX_EP_REGISTERS_96 JAX_EP_REGISTERS_88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define JAX_EP_REGISTERS_104 JAX_EP_REGISTERS_96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define JAX_EP_REGISTERS_112 JAX_EP_REGISTERS_104 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define JAX_EP_REGISTERS_120 JAX_EP_REGISTERS_112 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define JAX_EP_REGISTERS_128 JAX_EP_REGISTERS_120 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define JAX_EP_OPERANDS_8(d, i)                                                                               \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define JAX_EP_FIRST_8(d) JAX_EP_OPERANDS_8(d, 0)
#define JAX_EP_FIRST_16(d) JAX_EP_FIRST_8(d), JAX_EP_OPERANDS_8(d, 8)
#define JAX_EP_FIRST_24(d) JAX_EP_FIRST_16(d), JAX_EP_OPERANDS_8(d, 16)
#define JAX_EP_FIRST_32(d) JAX_EP_FIRST_24(d), JAX_EP_OPERANDS_8(d, 24)
#define JAX_EP_FIRST_40(d) JAX_EP_FIRST_32(d), JAX_EP_OPERANDS_8(d, 32)
#define JAX_EP_FIRST_48(d) JAX_EP_FIRST_40(d), JAX_EP_OPERANDS_8(d, 40)
#define JAX_EP_FIRST_56(d) JAX_EP_FIRST_48(d), JAX_EP_OPERANDS_8(d, 48)
#define JAX_EP_FIRST_64(d) JAX_EP_FIRST_56(d), JAX_EP_OPERANDS_8(d, 56)
#define JAX_EP_FIRST_72(d) JAX_EP_FIRST_64(d), JAX_EP_OPERANDS_8(d, 64)
#define JAX_EP_FIRST_80(d) JAX_EP_FIRST_72(d), JAX_EP_OPERANDS_8(d, 72)
#define JAX_EP_FIRST_88(d) JAX_EP_FIRST_80(d), JAX_EP_OPERANDS_8(d, 80)
#define JAX_EP_FIRST_96(d) JAX_EP_FIRST_88(d), JAX_EP_OPERANDS_8(d, 88)
#define JAX_EP_FIRST_104(d) JAX_EP_FIRST_96(d), JAX_EP_OPERANDS_8(d, 96)
#define JAX_EP_FIRST_112(d) JAX_EP_FIRST_104(d), JAX_EP_OPERANDS_8(d, 104)
#define JAX_EP_FIRST_120(d) JAX_EP_FIRST_112(d), JAX_EP_OPERANDS_8(d, 112)
#define JAX_EP_FIRST_128(d) JAX_EP_FIRST_120(d), JAX_EP_OPERANDS_8(d, 120)

// The instruction for one width. The numbers are those of the operands that follow the accumulators.
#define JAX_EP_WGMMA(type, width, count, a, b, add, mn_a, mn_b)                                                 \
  asm volatile("{ .reg .pred add; setp.ne.b32 add, %" #add ", 0; wgmma.mma_async.sync.aligned.m64n" #width      \
               "k16.f32." type "." type " {" JAX_EP_REGISTERS_##count "}, %" #a ", %" #b ", add, 1, 1, %" #mn_a \
                                                                      ", %" #mn_b "; }"                         \
               : JAX_EP_FIRST_##count(d)                                                                        \
               : "l"(a_tile), "l"(b_tile), "r"(int{add_to_d}), "n"(int{kMnA}), "n"(int{kMnB}))
// float8 contracts 32; both operands are contiguous along the contraction.
#define JAX_EP_WGMMA_FLOAT8(width, count, a, b, add)                                                       \
  asm volatile("{ .reg .pred add; setp.ne.b32 add, %" #add ", 0; wgmma.mma_async.sync.aligned.m64n" #width \
               "k32.f32.e4m3.e4m3 {" JAX_EP_REGISTERS_##count "}, %" #a ", %" #b ", add, 1, 1; }"          \
               : JAX_EP_FIRST_##count(d)                                                                   \
               : "l"(a_tile), "l"(b_tile), "r"(int{add_to_d}))
#define JAX_EP_WIDTH(width, count, a, b, add, mn_a, mn_b)        \
  if constexpr (kWidth == width) {                               \
    if constexpr (std::is_same_v<T, Float8E4M3>)                 \
      JAX_EP_WGMMA_FLOAT8(width, count, a, b, add);              \
    else if constexpr (std::is_same_v<T, __nv_bfloat16>)         \
      JAX_EP_WGMMA("bf16", width, count, a, b, add, mn_a, mn_b); \
    else                                                         \
      JAX_EP_WGMMA("f16", width, count, a, b, add, mn_a, mn_b);  \
  }

// D [64, kWidth] = A [64, 32 bytes] x B [32 bytes, kWidth], plus D if add_to_d. kMnA, kMnB: the tile's contiguous
// dimension is not the contracted one. `d` may have more registers than the width needs.
template <class T, int kWidth, bool kMnA, bool kMnB, int kCount>
JAX_EP_FN void multiply(float (&d)[kCount], uint64_t a_tile, uint64_t b_tile, bool add_to_d) {
  static_assert(kWidth % 16 == 0 && kWidth <= 2 * kCount);
  static_assert(!std::is_same_v<T, Float8E4M3> || (!kMnA && !kMnB));
  JAX_EP_WIDTH(16, 8, 8, 9, 10, 11, 12)
  JAX_EP_WIDTH(32, 16, 16, 17, 18, 19, 20)
  JAX_EP_WIDTH(48, 24, 24, 25, 26, 27, 28)
  JAX_EP_WIDTH(64, 32, 32, 33, 34, 35, 36)
  JAX_EP_WIDTH(80, 40, 40, 41, 42, 43, 44)
  JAX_EP_WIDTH(96, 48, 48, 49, 50, 51, 52)
  JAX_EP_WIDTH(112, 56, 56, 57, 58, 59, 60)
  JAX_EP_WIDTH(128, 64, 64, 65, 66, 67, 68)
  JAX_EP_WIDTH(144, 72, 72, 73, 74, 75, 76)
  JAX_EP_WIDTH(160, 80, 80, 81, 82, 83, 84)
  JAX_EP_WIDTH(176, 88, 88, 89, 90, 91, 92)
  JAX_EP_WIDTH(192, 96, 96, 97, 98, 99, 100)
  JAX_EP_WIDTH(208, 104, 104, 105, 106, 107, 108)
  JAX_EP_WIDTH(224, 112, 112, 113, 114, 115, 116)
  JAX_EP_WIDTH(240, 120, 120, 121, 122, 123, 124)
  JAX_EP_WIDTH(256, 128, 128, 129, 130, 131, 132)
}

}  // namespace jax_ep::gemm
