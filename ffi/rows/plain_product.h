// Matrix products by plain loops, where there is no core for them: on the CPU.
#pragma once

#include "comm/dtype.h"
#include "comm/integers.h"
#include "rows/numeric.h"

namespace jax_ep {

// b [K, N], or [N, K] if transposed.
struct Factor {
  const char* data;
  int k, n;
  bool transposed;
};

// Row by row, a panel of columns at a time, in float32: out [rows, N] = a [rows, K] x b.
template <class In, class Out>
JAX_EP_FN void multiply_rows(const In* a, const Factor& b, Out* out, int rows) {
  constexpr int kPanel = 32;
  const In* values = reinterpret_cast<const In*>(b.data);
  const int64_t along_k = b.transposed ? 1 : b.n, along_n = b.transposed ? b.k : 1;
  for (int first = 0; first < b.n; first += kPanel) {
    const int columns = smaller(kPanel, b.n - first);
    for (int row = 0; row < rows; ++row) {
      float total[kPanel] = {};
      for (int k = 0; k < b.k; ++k) {
        const float left = to_float(a[int64_t{row} * b.k + k]);
        const In* line = values + k * along_k + first * along_n;
        for (int column = 0; column < columns; ++column) total[column] += left * to_float(line[column * along_n]);
      }
      for (int column = 0; column < columns; ++column)
        from_float(total[column], &out[int64_t{row} * b.n + first + column]);
    }
  }
}

// A product of rows in groups: a [rows, K] times the matrix of each row's group, which lie behind each other.
struct GroupedFactors {
  const char* a;
  Factor b;

  // From a row on, with the group-th matrix. Values have so many bytes.
  JAX_EP_FN GroupedFactors at(int row, int group, int64_t bytes) const {
    GroupedFactors moved = *this;
    moved.a += int64_t{row} * b.k * bytes;
    moved.b.data += int64_t{group} * b.k * b.n * bytes;
    return moved;
  }
};

// One value of a product, rounded.
template <class T>
JAX_EP_FN T value_of_product(const GroupedFactors& term, int row, int column) {
  const auto& [a, b] = term;
  const int64_t along_k = b.transposed ? 1 : b.n, along_n = b.transposed ? b.k : 1;
  const T* const left = reinterpret_cast<const T*>(a) + int64_t{row} * b.k;
  const T* const right = reinterpret_cast<const T*>(b.data) + column * along_n;
  float total = 0;
  for (int k = 0; k < b.k; ++k) total += to_float(left[k]) * to_float(right[k * along_k]);
  T result;
  from_float(total, &result);
  return result;
}

// The operands are of the dtype of the result, or of one that is widened to it.
template <class Out>
JAX_EP_FN void multiply_rows(DType operand_dtype, const char* a, const Factor& b, Out* out, int rows) {
  switch (operand_dtype) {
    case DType::float32:
      return multiply_rows(reinterpret_cast<const float*>(a), b, out, rows);
    case DType::bfloat16:
      return multiply_rows(reinterpret_cast<const BFloat16*>(a), b, out, rows);
    case DType::float16:
      return multiply_rows(reinterpret_cast<const Float16*>(a), b, out, rows);
  }
}

}  // namespace jax_ep
