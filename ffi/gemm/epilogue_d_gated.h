// The epilogue that goes backward through a gated unit, activation(gate) * up (Product). The sums are the cotangent of
// the unit before rows are weighed.
//
// The algorithm is SonicMoE's (Guo et al., 2025): one pass over gate and up yields their cotangents, the left operand
// of the gradient of the matrix behind the unit, and the gradients of the rows' weights.
#pragma once

#include "gemm/epilogue.h"
#include "gemm/ptx/arithmetic.h"

namespace jax_ep::gemm {

struct ValueAndSlope {
  float value, slope;
};

// 1 / (1 + e^-x)
JAX_EP_FN float sigmoid(float x) {
  constexpr float kLog2E = 1.4426950408889634F;
  return reciprocal_fast(1 + exp2_fast(-kLog2E * x));
}

// As in jax.nn, in float32.
template <Activation kActivation>
JAX_EP_FN ValueAndSlope differentiate(float x) {
  if constexpr (kActivation == Activation::silu) {
    const float sigma = sigmoid(x), value = x * sigma;
    return {value, sigma + value * (1 - sigma)};
  } else if constexpr (kActivation == Activation::relu) {
    return {x > 0 || x != x ? x : 0.0F, x > 0 ? 1.0F : 0.0F};
  } else {  // (1 + tanh(y)) / 2 = sigmoid(2 y)
    constexpr float kOuter = 2 * 0.7978845608F, kInner = 0.044715F;
    const float square = x * x, sigma = sigmoid(kOuter * x * (1 + kInner * square)), value = x * sigma;
    return {value, sigma + value * (1 - sigma) * kOuter * (1 + 3 * kInner * square)};
  }
}

template <class T>
struct StoreDGated {
  static constexpr int kVecValues = 16 / sizeof(T), kLineVectors = kLineBytes / 16;
  static constexpr int kRowsAtOnce = kWarpgroup * 32 / kLineVectors, kVecs = kChunkRows / kRowsAtOnce;  // of a thread
  static constexpr int kPartRows = 2 * kChunkRows;                                                      // at once
  static_assert(kSlice == kSumColumns, "a warpgroup's columns have one sum a row");
  const Product& product;

  JAX_EP_FN StoreDGated(const Maps&, const Product& product) : product(product) {}

  // A warpgroup has 64 columns in each part.
  template <int kParts, int kCount, class Memory>
  JAX_EP_FN void store(const Problem& problem, const RowTile& tile, const float (&d)[kParts][kCount], Memory& shared,
                       int& /*chunks*/, int warp, int lane) const {
#pragma unroll
    for (int part = 0; part < kParts; ++part)
#pragma unroll
      for (int first = 0; first < 2 * kCount; first += kPartRows)
        store_part(problem, tile, first, tile.col + (warp / kWarpgroup * kParts + part) * kSlice, d[part] + first / 2,
                   shared, warp, lane);
  }

 private:
  // 16 bytes of a row of gate and of up.
  struct Operands {
    uint4 gate, up;
    float weight;
  };

  // What a thread has of a chunk: 16 bytes of kVecs rows.
  struct Vectors {
    int row, row_end, column;  // of the first; no others are wanted from row_end on
    bool inside;               // the matrix

    JAX_EP_FN bool wants(int i) const { return inside && row + i * kRowsAtOnce < row_end; }
  };

  // 64 columns, from `col` on, of the rows of a tile from `first` on. They go through both buffers of a warpgroup. The
  // loop over chunks is not unrolled: code that does not fit the instruction cache made a product of 517 us take 883.
  template <class Memory>
  JAX_EP_FN void store_part(const Problem& problem, const RowTile& tile, int first, int col, const float* d,
                            Memory& shared, int warp, int lane) const {
    if (first >= tile.rows) return;
    const int barrier = 1 + warp / kWarpgroup, thread = threadIdx.x % (kWarpgroup * 32);
    const int vec = thread % kLineVectors, line = thread / kLineVectors, column = col + vec * kVecValues;
    float* const sums = product.row_sums + int64_t{col / kSumColumns} * problem.m;
    char* const buffers = chunks_of(shared, warp / kWarpgroup);
    Vectors vectors{tile.row + first + line, smaller(tile.row_end, tile.row + tile.rows), column, column < problem.n};
    Operands next[kVecs];
    load(next, vectors);
    ptx::sync_some(barrier, kWarpgroup * 32);  // until the buffers are read
#pragma unroll
    for (int chunk = 0; chunk < kPartRows / kChunkRows; ++chunk)
      stage_chunk<T>(buffers + chunk * kChunkBytes, warp % kWarpgroup * 16, d + chunk * kChunkRows / 2, lane);
    ptx::sync_some(barrier, kWarpgroup * 32);
    const char* from = buffers + swizzled(line, vec);
#pragma unroll 1
    for (int end = smaller(tile.rows - first, kPartRows), chunk = 0; chunk < end; chunk += kChunkRows) {
      const Vectors now = vectors;
      Operands operands[kVecs];
#pragma unroll
      for (int i = 0; i < kVecs; ++i) operands[i] = next[i];
      vectors.row += kChunkRows;
      if (chunk + kChunkRows < end) load(next, vectors);
      switch (product.activation) {
        case Activation::silu:
          finish<Activation::silu>(now, operands, from, sums, vec);
          break;
        case Activation::gelu:
          finish<Activation::gelu>(now, operands, from, sums, vec);
          break;
        default:
          finish<Activation::relu>(now, operands, from, sums, vec);
      }
      from += kChunkBytes;
    }
  }

  JAX_EP_FN void load(Operands (&to)[kVecs], const Vectors& vectors) const {
#pragma unroll
    for (int i = 0; i < kVecs; ++i)
      if (vectors.wants(i)) to[i] = load(vectors.row + i * kRowsAtOnce, vectors.column);
  }
  JAX_EP_FN Operands load(int row, int column) const {
    const int64_t at = int64_t{row} * product.columns + column;
    const auto vector = [](const void* array, int64_t first) {
      return __ldg(reinterpret_cast<const uint4*>(static_cast<const T*>(array) + first));
    };
    return {vector(product.gate, at), vector(product.up, product.second_column() + at),
            __ldg(product.row_weights + row)};
  }

  template <Activation kActivation>
  JAX_EP_FN void finish(const Vectors& vectors, const Operands (&operands)[kVecs], const char* from, float* sums,
                        int vec) const {
    static_assert(kRowsAtOnce % 8 == 0, "the swizzle repeats every eight lines");
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      const uint4 back = *reinterpret_cast<const uint4*>(from + i * kRowsAtOnce * kLineBytes);
      const int row = vectors.row + i * kRowsAtOnce;
      float sum = 0;
      if (vectors.wants(i)) sum = store_vector<kActivation>(operands[i], back, row, vectors.column);
#pragma unroll
      for (int step = 1; step < kLineVectors; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
      if (vec == 0 && vectors.wants(i)) sums[row] = sum;
    }
  }

  // Returns the sum over the values of `back` times the unit.
  template <Activation kActivation>
  JAX_EP_FN float store_vector(const Operands& x, const uint4& back, int row, int column) const {
    float sum = 0;
    uint4 units, d_gates, d_ups;
    const T *const b = values(back), *const g = values(x.gate), *const u = values(x.up);
#pragma unroll
    for (int i = 0; i < kVecValues; i += 2) {
      float unit[2], d_gate[2], d_up[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float up = float(u[i + j]), weighed = x.weight * float(b[i + j]);
        const auto [value, slope] = differentiate<kActivation>(float(g[i + j]));
        sum += float(b[i + j]) * (value * up);
        unit[j] = x.weight * (value * up);
        d_gate[j] = weighed * up * slope;
        d_up[j] = weighed * value;
      }
      word(units, i / 2) = pack(unit[0], unit[1], T{});
      word(d_gates, i / 2) = pack(d_gate[0], d_gate[1], T{});
      word(d_ups, i / 2) = pack(d_up[0], d_up[1], T{});
    }
    const int64_t at = int64_t{row} * product.columns + column;
    *reinterpret_cast<uint4*>(static_cast<T*>(product.result) + int64_t{row} * product.n + column) = units;
    *reinterpret_cast<uint4*>(static_cast<T*>(product.first_product) + at) = d_gates;
    *reinterpret_cast<uint4*>(static_cast<T*>(product.second_product) + product.second_column() + at) = d_ups;
    return sum;
  }

  JAX_EP_FN static const T* values(const uint4& vec) { return reinterpret_cast<const T*>(&vec); }
  JAX_EP_FN static uint32_t& word(uint4& vec, int i) { return reinterpret_cast<uint32_t*>(&vec)[i]; }
};

}  // namespace jax_ep::gemm
