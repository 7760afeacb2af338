// Matrix products by plain loops, for the CPU.
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
        const In* slice = values + k * along_k + first * along_n;
        for (int column = 0; column < columns; ++column) total[column] += left * to_float(slice[column * along_n]);
      }
      for (int column = 0; column < columns; ++column)
        from_float(total[column], &out[int64_t{row} * b.n + first + column]);
    }
  }
}

// The operands have the dtype of the result, or a narrower one.
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
