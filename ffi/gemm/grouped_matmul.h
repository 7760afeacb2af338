// The description of a matrix product on Hopper, for every kernel of this folder.
#pragma once

#include <cstdint>

#include "comm/dtype.h"
#include "comm/float8.h"

namespace jax_ep::gemm {

// What the groups divide. Groups are consecutive ranges. Their sizes are on the device.
enum class Grouping {
  none,       // out [m, n] = lhs [m, k] x rhs [k, n]
  m_grouped,  // out [m, n]: the rows in group g are lhs's rows there x rhs[g]; rows after the last group are zero
  k_grouped,  // out [g, m, n] = lhs's columns in group g [m, ...] x rhs's rows in group g [..., n]
};

// The dtype of an array. float8 is e4m3.
enum class Element { float32, bfloat16, float16, float8 };
JAX_EP_CONSTANT_FN Element element_of(DType dtype) {
  switch (dtype) {
    case DType::float32:
      return Element::float32;
    case DType::bfloat16:
      return Element::bfloat16;
    case DType::float16:
      break;
  }
  return Element::float16;
}

// Before an activation, products are rounded to the dtype of the operands, or to bfloat16 if the operands are float8.
enum class Formula {
  store,   // lhs x rhs, rounded
  gated,   // activation(lhs x rhs) * (lhs x second_rhs): rhs is the gate, second_rhs is up. Quantized if out is float8
  summed,  // lhs x rhs + second_lhs x second_rhs, rounded once
};

// silu, gelu (by tanh) and relu are those of jax.nn, applied to the gate. clamped_swiglu (GPT-OSS) has a limit and a
// slope: (clip(up, -limit, limit) + 1) * (g * sigmoid(slope * g)) with g = min(gate, limit).
enum class Activation { none, silu, gelu, relu, clamped_swiglu };

// Which operand is gathered: row i of the operand is row indices[i] of the array. Index -1 is a row of zeros, any other
// index outside the array is a row of NaN.
enum class Gathered { none, lhs, rhs };

constexpr int kTmaMultiple = 8;  // 16-bit values: TMA needs rows that are multiples of 16 bytes

// Arrays are row-major without gaps. Row lengths are multiples of kTmaMultiple; in float8 n and k are multiples of
// kScaleBlock. kernels/grouped_matmul/args.h says which products there are.
struct GroupedMatmul {
  Grouping grouping;
  Formula formula;
  Activation activation;         // of a gated unit
  float limit, slope;            // of clamped_swiglu
  bool keeps_products;           // gated: also stores lhs x rhs and lhs x second_rhs
  bool is_biased;                // m-grouped: the group's bias is added to each product before it is rounded
  Element operand_dtype, dtype;  // of lhs and rhs, of the result
  Gathered gathered;
  bool rhs_is_k_by_n;   // each matrix of rhs is stored [k, n] rather than [n, k]
  int m, n, k, groups;  // m-grouped: m of all groups; k-grouped: k of all groups
  int columns;          // row length of `rhs`: n, or 2 n if gate and up are concatenated (gate first)

  int source_rows;               // of the array whose rows are gathered
  const int32_t* indices;        // m-grouped [m], k-grouped [k]
  const void *lhs, *second_lhs;  // [m, k], k-grouped [k, m]
  const float* lhs_scales;       // [m, k / 128]
  const void *rhs,
      *second_rhs;  // [groups, k, columns] or [groups, columns, k]; without groups as one, k-grouped [k, n]
  const float *rhs_scales, *second_rhs_scales;  // [groups, columns / 128, k / 128]
  const void *bias, *second_bias;               // [groups, columns], in the dtype of the operands; or null
  const int32_t* group_sizes;                   // on the device; null without groups
  uint32_t* counter;                            // m-grouped: a word on the device that no other product uses meanwhile
  void* result;                                 // [m, n], k-grouped [groups, m, n]
  float* result_scales;                         // [m, n / 128]
  void *first_product, *second_product;         // [m, columns], kept; if columns is 2 n, the first has both

  JAX_EP_CONSTANT_FN bool is_float8() const { return operand_dtype == Element::float8; }
  // Kernels gather the left operand. If the right one is gathered, the kernel swaps the operands and transposes the
  // result back (StoreTransposed).
  JAX_EP_CONSTANT_FN bool is_transposed() const { return gathered == Gathered::rhs; }
  // Where the second matrix begins in the array that holds it.
  JAX_EP_CONSTANT_FN int second_column() const { return columns - n; }
};

}  // namespace jax_ep::gemm
