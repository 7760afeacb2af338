// Tiles have 16 rows here, because kBlockRows is 16 on the CPU.
#pragma once

#define kBlockM kHopperBlockM
#include "../../../../ffi/gemm/problem.h"
#undef kBlockM

namespace jax_ep::gemm {

constexpr int kBlockM = 16;

}  // namespace jax_ep::gemm
