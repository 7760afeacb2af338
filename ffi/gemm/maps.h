// How TMA finds the arrays of a product.
#pragma once

#include <cuda.h>

namespace jax_ep::gemm {

// Those of operands find slices of 64 lines, those of results a warp's box of 16. Only those are set whose array a
// product has.
struct Maps {
  CUtensorMap lhs, second_lhs, rhs, second_rhs, result, first_product, second_product;
};

}  // namespace jax_ep::gemm
