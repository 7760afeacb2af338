// The tensor maps by which TMA finds the arrays of a product.
#pragma once

#include <cuda.h>

namespace jax_ep::gemm {

// Maps of operands have boxes of 64 rows, a slice. Maps of results have boxes of 16 rows, a warp's. A map is set if the
// product has the array.
struct Maps {
  CUtensorMap lhs, second_lhs, rhs, second_rhs, result, first_product, second_product;
};

}  // namespace jax_ep::gemm
