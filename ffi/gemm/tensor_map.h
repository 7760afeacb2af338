// Makes tensor maps, which describe arrays to TMA.
#pragma once

#include <cuda.h>

#include <optional>
#include <string>

#include "gemm/grouped_matmul.h"

namespace jax_ep::gemm {

// [count, outer, inner], without gaps. TMA takes two values of float8 for one of 16 bits, so `inner` is even.
struct Matrices {
  const void* data;
  Element element;
  int inner, outer, count;
};

// Sets `map` to boxes of `rows` times 128 bytes, swizzled. What lies outside the matrices reads as zero. Returns an
// error, or nothing.
std::optional<std::string> describe_boxes(const Matrices& matrices, int rows, CUtensorMap* map);

}  // namespace jax_ep::gemm
