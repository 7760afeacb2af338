// Tensor maps, by which TMA finds the arrays of a product.
#pragma once

#include <cuda.h>

#include <optional>
#include <string>

#include "gemm/grouped_matmul.h"

namespace jax_ep::gemm {

// Maps of operands have boxes of 64 rows, a slice. Maps of results have boxes of 16 rows, a warp's. A map is set if the
// product has the array.
struct Maps {
  CUtensorMap lhs, second_lhs, rhs, second_rhs, result, first_product, second_product;
};

// [count, outer, inner], without gaps. TMA treats two float8 values as one of 16 bits, so `inner` is even.
struct Matrices {
  const void* data;
  Element element;
  int inner, outer, count;
};

// Sets `map` to swizzled boxes of `rows` x 128 bytes. Values outside the matrices are zero. Returns an error, or
// nothing.
std::optional<std::string> describe_boxes(const Matrices& matrices, int rows, CUtensorMap* map);

}  // namespace jax_ep::gemm
