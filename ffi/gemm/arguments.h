// What matrix products on Hopper are called with.
#pragma once

#include <cstdint>

#include "comm/dtype.h"
#include "gemm/problem.h"

namespace jax_ep::gemm {

// Row-major arrays without gaps. Dimensions and leading dimensions of 16-bit arrays are multiples of 8.
struct Arguments {
  Grouping grouping;
  int m, n, k, groups;  // as in Problem
  DType in, out;        // in: 16-bit; out: as in, or float32 if a is [m, k] and b [k, n]
  bool a_is_k_by_m;     // a is stored [k, m] rather than [m, k]: k-grouped
  bool b_is_k_by_n;     // b is stored [k, n] (of every group) rather than [n, k]
  const void* a;
  const void* b;
  void* out_data;
  const int32_t* group_sizes;  // on the device; null without groups
  uint32_t* counter;           // m-grouped: memory on the device, of this product alone while it runs
};

enum class Activation { silu, gelu, relu };  // as in jax.nn, gelu by tanh

// activation(rows x gate) * (rows x up), both products rounded to the dtype before, and kept if `keeps_products`.
// Row-major arrays without gaps, whose dimensions are multiples of 8.
struct GatedArguments {
  int m, n, k, groups;
  DType dtype;  // of all, 16-bit
  Activation activation;
  bool keeps_products;
  const void* rows;       // [m, k]
  const void *gate, *up;  // [groups, k, columns]: the first n of gate, those of up from up_column on
  int columns, up_column;
  void* out_data;              // [m, n]
  void *of_gate, *of_up;       // if they are kept: [m, columns]; both in of_gate where columns is 2 n
  const int32_t* group_sizes;  // on the device
  uint32_t* counter;           // memory on the device, of this product alone while it runs
};

// first_rows x first transposed + second_rows x second transposed, rounded once. Row-major arrays without gaps, whose
// dimensions are multiples of 8.
struct SummedArguments {
  int m, n, k, groups;
  DType dtype;                           // of all, 16-bit
  const void *first_rows, *second_rows;  // [m, k]
  const void *first, *second;            // [groups, n, k]
  void* out_data;                        // [m, n]
  const int32_t* group_sizes;            // on the device
  uint32_t* counter;                     // memory on the device, of this product alone while it runs
};

// A grouped product of float8 e4m3 operands. K and N are multiples of 128, row-major arrays without gaps.
constexpr int kFloat8Block = 128;  // values of a contraction that share a scale
struct Float8Arguments {
  int m, n, k, groups;
  DType out;                   // bfloat16 or float32
  const void* a;               // [m, k]
  const float* a_scales;       // [m, k / 128]
  const void* b;               // [groups, n, k]
  const float* b_scales;       // [groups, n / 128, k / 128]
  void* out_data;              // [m, n]
  const int32_t* group_sizes;  // on the device
};

// activation(rows x gate) * (rows x up) of float8 e4m3 operands, both products rounded to bfloat16 before, in float8: a
// scale per row and 128 columns. N and K are multiples of 128, row-major arrays without gaps.
struct GatedFloat8Arguments {
  int m, n, k, groups;
  Activation activation;
  const void* rows;                      // [m, k]
  const float* rows_scales;              // [m, k / 128]
  const void *gate, *up;                 // [groups, columns, k]: the first n of gate, those of up from up_column on
  const float *gate_scales, *up_scales;  // [groups, columns / 128, k / 128]
  int columns, up_column;
  void* out_data;              // [m, n]
  float* out_scales;           // [m, n / 128]
  const int32_t* group_sizes;  // on the device
};

}  // namespace jax_ep::gemm
