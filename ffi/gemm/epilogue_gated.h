// Epilogues of gated units: activation(rows x gate) * (rows x up).
#pragma once

#include "comm/float8.h"
#include "gemm/activation.h"
#include "gemm/epilogue.h"
#include "gemm/ptx/arithmetic.h"

namespace jax_ep::gemm {

// Gated units of 16-bit operands. One warpgroup has the sums of gate and the other has the sums of up. Both write them
// to shared memory, rounded. TMA stores them from there if they are kept, and every thread computes 16 bytes of the
// unit.
template <class T, Activation kActivation>
struct StoreGated {
  static_assert(kConsumers == 8 * kPieceRows / 2, "a thread has 16 bytes of each half of a piece");
  using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
  const Maps& maps;
  const GroupedMatmul& product;
  mutable ColumnBiases gate_biases, up_biases;

  JAX_EP_FN StoreGated(const Maps& maps, const GroupedMatmul& product) : maps(maps), product(product) {}

  // With one slab a warpgroup has gate or up. With two it has 64 columns of both.
  template <int kSlabs>
  JAX_EP_FN void begin(const Problem& problem, const RowTile& tile, int warp, int lane) const {
    const int warpgroup = warp / kWarpgroup, col = tile.col + (kSlabs == 1 ? 0 : warpgroup * kSlice);
    if (kSlabs == 2 || warpgroup == 0)
      gate_biases.read<T>(product.bias, problem, tile, product.columns, 0, col, problem.n, warp, lane);
    if (kSlabs == 2 || warpgroup == 1)
      up_biases.read<T>(product.second_bias, problem, tile, product.columns, product.second_column(), col, problem.n,
                        warp, lane);
  }

  // All consumers of a CTA call together. Before the barrier, each warp waits until TMA has read its previous piece. So
  // after the barrier the other buffer is free.
  template <class Memory>
  JAX_EP_FN void store(const Problem& problem, const RowTile& tile, float (&d)[1][kMaxRows / 2], Memory& shared,
                       int& stored, int warp, int lane) const {
    const bool keeps = product.keeps_products;
    (warp < kWarpgroup ? gate_biases : up_biases).add(d[0]);
    const int row_end = smaller(tile.row_end, tile.row + tile.rows);
#pragma unroll
    for (int piece = 0; piece < kRowSlices; ++piece) {
      const int first = piece * kPieceRows;
      if (first >= tile.rows) break;
      const int buffer = stored++ % 2 * kPieceBytes;
      char* const own = pieces_of(shared, warp / kWarpgroup) + buffer;
      piece_to_shared<T>(own, warp % kWarpgroup * 16, d[0] + first / 2, lane);
      if (keeps) {
        ptx::shared_proxy_fence();
        if (lane == 0) ptx::wait_stores_read<0>();
      }
      ptx::sync_some(1, kConsumers);
      if (keeps) keep(problem, tile, first, row_end, own, warp, lane);
      const char *const gate = pieces_of(shared, 0) + buffer, *const up = pieces_of(shared, 1) + buffer;
      const int vec = threadIdx.x % 8, col = tile.col + vec * 8;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int smem_row = half * kPieceRows / 2 + threadIdx.x / 8, row = tile.row + first + smem_row;
        if (row >= row_end || col >= problem.n) continue;
        const uint4 of_gate = *reinterpret_cast<const uint4*>(gate + swizzled(smem_row, vec));
        const uint4 of_up = *reinterpret_cast<const uint4*>(up + swizzled(smem_row, vec));
        T* const out = static_cast<T*>(product.result) + int64_t{row} * problem.n + col;
        *reinterpret_cast<uint4*>(out) = gated<kActivation, Pair>(of_gate, of_up, product.limit, product.slope);
      }
    }
  }

  // A warpgroup has 64 columns of both products.
  template <class Memory>
  JAX_EP_FN void store(const Problem& problem, const RowTile& tile, float (&d)[2][kMaxGathered / 2], Memory& shared,
                       int& stored, int warp, int lane) const {
    const int col = tile.col + warp / kWarpgroup * kSlice, up = product.second_column();
    gate_biases.add(d[0]);
    up_biases.add(d[1]);
    if (product.keeps_products) {
      store_columns<T, kMaxGathered>(maps.first_product, product.first_product, product.columns, col, problem.n, tile,
                                     d[0], shared, stored, warp, lane);
      store_columns<T, kMaxGathered>(maps.second_product, product.second_product, product.columns, up + col,
                                     up + problem.n, tile, d[1], shared, stored, warp, lane);
    }
    float units[kMaxGathered / 2];
#pragma unroll
    for (int i = 0; i < kMaxGathered / 2; i += 8) {
      const auto packed = [&](const float* x) {
        return make_uint4(pack(x[0], x[1], T{}), pack(x[2], x[3], T{}), pack(x[4], x[5], T{}), pack(x[6], x[7], T{}));
      };
      const uint4 both = gated<kActivation, Pair>(packed(d[0] + i), packed(d[1] + i), product.limit, product.slope);
      const uint32_t words[] = {both.x, both.y, both.z, both.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const Pair pair = reinterpret_cast<const Pair&>(words[j]);
        units[i + 2 * j] = float(pair.x), units[i + 2 * j + 1] = float(pair.y);
      }
    }
    store_columns<T, kMaxGathered>(maps.result, product.result, problem.n, col, problem.n, tile, units, shared, stored,
                                   warp, lane);
  }

 private:
  // Stores a warp's 16 rows of its warpgroup's product in `own`.
  JAX_EP_FN void keep(const Problem& problem, const RowTile& tile, int first, int row_end, const char* own, int warp,
                      int lane) const {
    const int smem_row = warp % kWarpgroup * kOutRows, row = tile.row + first + smem_row;
    const char* const from = own + smem_row * kSwizzleBytes;
    if (warp < kWarpgroup)
      store_strip(maps.first_product, static_cast<T*>(product.first_product), product.columns, row, row_end, tile.col,
                  problem.n, from, lane);
    else
      store_strip(maps.second_product, static_cast<T*>(product.second_product), product.columns, row, row_end,
                  product.second_column() + tile.col, product.second_column() + problem.n, from, lane);
    if (lane == 0) ptx::commit_stores();
  }
};

// A thread's units of a half: pairs of columns of two rows. Adjacent lanes have adjacent pairs.
struct GatedPairs {
  static constexpr int kPairs = kSlice / 8;
  __nv_bfloat162 pairs[2][kPairs];

  template <Activation kActivation>
  JAX_EP_FN void activate_products(const float (&total)[kGatedWidth / 2]) {
#pragma unroll
    for (int i = 0; i < 2 * kPairs; ++i) {
      const int gate = 2 * i, up = gate + kSlice / 2;
      pairs[i % 2][i / 2] = __hmul2(activate<kActivation>(__floats2bfloat162_rn(total[gate], total[gate + 1])),
                                    __floats2bfloat162_rn(total[up], total[up + 1]));
    }
  }
  // The bits of the largest magnitude in the warp's columns of a row. NaN counts as the largest. The four lanes of a
  // row call together.
  JAX_EP_FN uint32_t largest(int row) const {
    uint32_t both = 0;
#pragma unroll
    for (int i = 0; i < kPairs; ++i)
      both = __vmaxu2(both, reinterpret_cast<const uint32_t&>(pairs[row][i]) & 0x7fff7fffu);
    uint32_t most = larger(static_cast<int>(both & 0xffff), static_cast<int>(both >> 16));
    most = max(most, __shfl_xor_sync(~0u, most, 1));
    return max(most, __shfl_xor_sync(~0u, most, 2));
  }
};

// Gated units of float8 operands (multiply_float8.h), quantized to float8 with a scale per row of a tile.
template <Activation kActivation>
struct StoreGatedFloat8 {
  char* values;   // [M, N]
  float* scales;  // [M, N / 128]

  JAX_EP_FN StoreGatedFloat8(const Maps&, const GroupedMatmul& product)
      : values(static_cast<char*>(product.result)), scales(product.result_scales) {}

  // All consumers of a CTA call together. Magnitudes are read and values are written only between the two barriers, so
  // neither is overwritten while others read.
  template <class Memory>
  JAX_EP_FN void store(const Problem& problem, const Tile& tile, const float (&halves)[kHalves][kGatedWidth / 2],
                       Memory& shared, int& /*stored*/, int warp, int lane) const {
    const int warpgroup = warp / kWarpgroup, first = warp % kWarpgroup * kOutRows + lane / 4;
    char* const quantized = shared.values();
    GatedPairs made[kHalves];
    made[0].activate_products<kActivation>(halves[0]);
    made[1].activate_products<kActivation>(halves[1]);
#pragma unroll
    for (int i = 0; i < 2 * kHalves; ++i) {
      const uint32_t largest = made[i / 2].largest(i % 2);
      if (lane % 4 == 0)
        shared.beside_result().largest[warpgroup][i / 2 * kSlice + first + i % 2 * 8] = static_cast<uint16_t>(largest);
    }
    ptx::sync_some(1, kConsumers);
#pragma unroll
    for (int i = 0; i < 2 * kHalves; ++i) {
      const int smem_row = i / 2 * kSlice + first + i % 2 * 8, row = tile.row + smem_row;
      const uint32_t bits = max(uint32_t{shared.beside_result().largest[0][smem_row]},
                                uint32_t{shared.beside_result().largest[1][smem_row]});
      const float largest = __uint_as_float(bits << 16);
      const float factor = factor_for(largest);
      if (warpgroup == 0 && lane % 4 == 0 && row < tile.row_end)
        scales[int64_t{row} * (problem.n / kScaleBlock) + tile.col / kScaleBlock] = scale_for(largest);
#pragma unroll
      for (int pair = 0; pair < GatedPairs::kPairs; ++pair) {
        const int column = warpgroup * kSlice + pair * 8 + lane % 4 * 2;
        *reinterpret_cast<uint16_t*>(quantized + swizzled(smem_row, column / 16) + column % 16) =
            scaled_to_float8(made[i / 2].pairs[i % 2][pair], factor);
      }
    }
    ptx::sync_some(1, kConsumers);
    const int smem_row = warp * kOutRows, row = tile.row + smem_row;
    if (row < tile.row_end)
      store_rows(values + int64_t{row} * problem.n + tile.col, problem.n, tile.row_end - row, kScaleBlock / 16,
                 quantized + smem_row * kSwizzleBytes, lane);
  }
};

}  // namespace jax_ep::gemm
