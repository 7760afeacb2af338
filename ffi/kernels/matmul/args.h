// What the matrix products with a collective are called with.
#pragma once

#include <cstdint>

#include "comm/dtype.h"
#include "comm/heap.h"
#include "comm/platform.h"

namespace jax_ep {

// This rank's factors of a sum of products over the ranks.
struct MatmulReduceArgs {
  DType dtype, operand_dtype;  // of the result, of a and b
  int m, n, k;
  bool transpose_b;  // b is [N, K]
  bool scatter;      // a rank gets its share of the rows alone
  const char* a;     // [M, K]
  const char* b;     // [K, N]
  char* result;      // [M, N], or [M / R, N]
  char* partial;     // [M, N]: the product of this rank
};

// Every rank's rows, one after the other, times this rank's matrix.
struct GatherMatmulArgs {
  DType dtype, operand_dtype;
  int m, n, k;  // m: rows of one rank
  bool transpose_b;
  const char* a;   // [M, K]
  const char* b;   // [K, N]
  char* result;    // [R M, N]
  char* gathered;  // [R M, K]
};

JAX_EP_CONSTANT_FN OpKind kind_of(const MatmulReduceArgs& args) {
  return args.scatter ? OpKind::matmul_reduce_scatter : OpKind::matmul_all_reduce;
}
JAX_EP_CONSTANT_FN OpKind kind_of(const GatherMatmulArgs&) { return OpKind::all_gather_matmul; }

JAX_EP_CONSTANT_FN int64_t result_bytes(const MatmulReduceArgs& args, int ranks) {
  return int64_t{args.scatter ? args.m / ranks : args.m} * args.n * size_of(args.dtype);
}

}  // namespace jax_ep
