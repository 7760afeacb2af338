// Tiles of 16 rows, as the row blocks of a CPU have.
#pragma once

#define kBlockM kHopperBlockM
#include "../../../../ffi/gemm/problem.h"
#undef kBlockM

namespace jax_ep::gemm {

constexpr int kBlockM = 16;

}  // namespace jax_ep::gemm
