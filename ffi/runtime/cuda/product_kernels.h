// The kernels of products. Each product_*.cu has a table of some, so that they compile in parallel.
#pragma once

#include "gemm/maps.h"
#include "gemm/problem.h"
#include "gemm/product.h"
#include "runtime/cuda/gemm_launch.h"

namespace jax_ep::gemm {

using ProductKernel = void (*)(Maps, Problem, Product);

Variants<ProductKernel> tile_kernels();
Variants<ProductKernel> swapped_kernels();
Variants<ProductKernel> gated_kernels();
Variants<ProductKernel> gathered_kernels();
Variants<ProductKernel> float8_kernels();

}  // namespace jax_ep::gemm
