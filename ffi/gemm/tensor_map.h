// Descriptions of arrays by which TMA finds boxes in them.
#pragma once

#include <cuda.h>

#include <optional>
#include <string>

#include "gemm/gemm.h"

namespace jax_ep::gemm {

// [count, outer, inner], without gaps.
struct Matrices {
  const void* data;
  DType dtype;
  int inner, outer, count;
};

// Describes boxes of `lines` times 128 bytes, swizzled; what lies outside the matrices reads as zero. Returns an error.
std::optional<std::string> describe_boxes(const Matrices& matrices, int lines, CUtensorMap* map);

}  // namespace jax_ep::gemm
