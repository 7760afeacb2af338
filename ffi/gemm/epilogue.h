// Epilogues that store sums. A warp moves its part of a finished tile from accumulators through shared memory to the
// result.
//
// An epilogue has store() in one of two forms: a call stores 16 rows of a warp (StoresStrips), or all that a warp has
// of a tile (StoresTiles). The second kind may change the sums, and count in `stored`, which is zero before the first
// tile of a warp. It may also have begin(), which reads operands of store() before the tile is multiplied (ReadsAhead).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "gemm/layout.h"
#include "gemm/ptx/cluster.h"
#include "gemm/ptx/copies.h"
#include "gemm/ptx/warps.h"
#include "gemm/row_schedule.h"
#include "gemm/tensor_map.h"

namespace jax_ep::gemm {

JAX_EP_FN uint32_t pack(float a, float b, __nv_bfloat16) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(a, b);
  return reinterpret_cast<const uint32_t&>(both);
}
JAX_EP_FN uint32_t pack(float a, float b, __half) {
  const __half2 both = __floats2half2_rn(a, b);
  return reinterpret_cast<const uint32_t&>(both);
}

template <class Epilogue, int kBlockN>
concept StoresStrips = requires(const Epilogue& epilogue, const Problem& problem, const Tile& tile,
                                const float (&sums)[kBlockN / 2], char (*buffers)[kOutBytes]) {
  epilogue.template store<kBlockN>(problem, tile, sums, buffers, /*strip=*/0, /*lane=*/0);
};

template <class Epilogue, class Tile, class Sums, class Memory>
concept StoresTiles =
    requires(const Epilogue& epilogue, const Problem& problem, const Tile& tile, Sums& sums, Memory& shared,
             int& stored) { epilogue.store(problem, tile, sums, shared, stored, /*warp=*/0, /*lane=*/0); };

template <class Epilogue, class Sums>
concept ReadsAhead = requires(const Epilogue& epilogue, const Problem& problem, const RowTile& tile) {
  epilogue.template begin<std::extent_v<Sums>>(problem, tile, /*warp=*/0, /*lane=*/0);
};

// Stores 16 rows x 64 columns, rounded. `d` has four values for each 8 columns: two of row lane / 4, two of row lane /
// 4 + 8.
template <class Out>
JAX_EP_FN void columns_to_shared(char* to, const float* d, int lane) {
  const int smem_row = lane & 15, half = lane >> 4;
#pragma unroll
  for (int pair = 0; pair < 4; ++pair, d += 8)
    store_matrices(to + swizzled(smem_row, 2 * pair + half), pack(d[0], d[1], Out{}), pack(d[2], d[3], Out{}),
                   pack(d[4], d[5], Out{}), pack(d[6], d[7], Out{}));
}
template <>
JAX_EP_FN void columns_to_shared<float>(char* to, const float* d, int lane) {
  const int smem_row = lane >> 2, vec = (lane & 3) >> 1, byte = (lane & 1) * 8;
#pragma unroll
  for (int eight = 0; eight < 4; ++eight, d += 4) {
    *reinterpret_cast<float2*>(to + swizzled(smem_row, 2 * eight + vec) + byte) = make_float2(d[0], d[1]);
    *reinterpret_cast<float2*>(to + swizzled(smem_row + 8, 2 * eight + vec) + byte) = make_float2(d[2], d[3]);
  }
}

// Stores the first `rows` rows and `vecs` 16-byte vectors of a strip, at edges, where TMA would write too much.
JAX_EP_FN void store_rows(char* to, int64_t row_bytes, int rows, int vecs, const char* from, int lane) {
  const int vec = lane & 7;
#pragma unroll
  for (int smem_row = lane >> 3; smem_row < kOutRows; smem_row += 4)
    if (smem_row < rows && vec < vecs)
      *reinterpret_cast<uint4*>(to + smem_row * row_bytes + vec * 16) =
          *reinterpret_cast<const uint4*>(from + swizzled(smem_row, vec));
}

// Whether half of a warp's sums fit into its buffers (swap_halves).
template <int kBlockN>
constexpr bool kCanSplit = kBlockN == 128;

// Adds the partial sums of both CTAs of a cluster: the CTAs swap halves of the columns, and each adds the half that it
// stores. a + b and b + a have the same bits, so the result does not depend on the CTA.
template <int kCount, class Memory>
JAX_EP_FN void swap_halves(float (&half)[kCount], const float (&d)[2 * kCount], Memory& shared, uint32_t parity,
                           int warp, int lane) {
  static_assert(kCount * 32 * sizeof(float) <= 2 * kOutBytes);
  const int cta_in_cluster = blockIdx.x % kCluster, peer = 1 - cta_in_cluster;
  float4* const brought = reinterpret_cast<float4*>(shared.out[warp]) + lane;
  __syncwarp();  // the other lanes may still read the buffer with plain loads
  if (lane == 0) {
    ptx::wait_stores_read<0>();
    arrive_with_data(&shared.swap_empty[warp], peer);
  }
  wait_for_data(&shared.swap_empty[warp], parity);
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    const auto at = [&](int j) { return cta_in_cluster == 0 ? d[kCount + i + j] : d[i + j]; };
    store_at_peer(brought + i / 4 * 32, peer, make_float4(at(0), at(1), at(2), at(3)));
  }
  arrive_with_data(&shared.swap_full[warp], peer);
  wait_for_data(&shared.swap_full[warp], parity);
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    const float4 other = brought[i / 4 * 32];
    const auto at = [&](int j) { return cta_in_cluster == 0 ? d[i + j] : d[kCount + i + j]; };
    half[i] = at(0) + other.x, half[i + 1] = at(1) + other.y;
    half[i + 2] = at(2) + other.z, half[i + 3] = at(3) + other.w;
  }
  __syncwarp();
}

// Hands a warp's sums to an epilogue. If the contraction is split, the CTAs of the cluster swap and add halves first.
template <class Epilogue, int kSlabs, int kCount, class Memory, class Tile>
JAX_EP_FN void store_sums(const Epilogue& epilogue, float (&d)[kSlabs][kCount], Memory& shared, const Problem& problem,
                          const Tile& tile, int& stored, int warp, int lane) {
  if constexpr (StoresTiles<Epilogue, Tile, float[kSlabs][kCount], Memory>) {
    epilogue.store(problem, tile, d, shared, stored, warp, lane);
  } else {
    constexpr int kBlockN = 2 * kCount;
    static_assert(StoresStrips<Epilogue, kBlockN>, "an epilogue stores strips or tiles");
#pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab) {
      const int strip = strip_of<kSlabs>(slab, warp);
      if (!kCanSplit<kBlockN> || tile.common != Common::tile) {
        epilogue.template store<kBlockN>(problem, tile, d[slab], shared.out[warp], strip, lane);
      } else if constexpr (kCanSplit<kBlockN>) {
        float half_d[kCount / 2];
        swap_halves(half_d, d[slab], shared, stored++ & 1, warp, lane);
        epilogue.template store<kBlockN / 2>(problem, tile, half_d, shared.out[warp], strip, lane);
      }
    }
  }
}

template <class Out>
struct StoreTile {
  const CUtensorMap& map;
  Out* out;
  const Out* bias = nullptr;  // [groups, n], of groups of rows

  JAX_EP_FN StoreTile(const CUtensorMap& map, void* out) : map(map), out(static_cast<Out*>(out)) {}
  JAX_EP_FN StoreTile(const Maps& maps, const GroupedMatmul& product) : StoreTile(maps.result, product.result) {
    bias = static_cast<const Out*>(product.bias);
  }

  // Stores a warp's accumulators of strip number `strip` of a tile, 16 rows. The last stores may still read `buffers`
  // on return.
  template <int kBlockN>
  JAX_EP_FN void store(const Problem& problem, const Tile& tile, const float (&d)[kBlockN / 2],
                       char (*buffers)[kOutBytes], int strip, int lane) const {
    constexpr int kColumns = kSwizzleBytes / sizeof(Out), kPieces = kBlockN / kColumns, kBuffers = kOutBuffers<kBlockN>;
    static_assert(kBlockN == 64 || kPieces % kBuffers == 0, "the next tile starts with the buffer that was read first");
    const int row = tile.row + strip * kOutRows, matrix = problem.grouping == Grouping::k_grouped ? tile.group : 0;
    const bool whole = row + kOutRows <= tile.row_end;
    if (row >= tile.row_end) return;
    char* const to = reinterpret_cast<char*>(out + (int64_t{matrix} * problem.m + row) * problem.n);
    uint32_t biases[kBlockN / 8];  // of two columns each
    bool biased = false;
    // Tiles of 192 columns have no registers left. Their products have no bias (kernels/grouped_matmul/args.h).
    if constexpr (sizeof(Out) == 2 && kBlockN != 192) {
      biased = bias != nullptr && tile.group < problem.groups;
      if (biased) read_biases<kBlockN>(biases, problem, tile, lane);
    }
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      const int col = tile.out_col + piece * kColumns;
      char* const buffer = buffers[piece % kBuffers];
      if (col < problem.n) {
        if (lane == 0) ptx::wait_stores_read<kBuffers - 1>();  // stores of the other buffers may still run
        __syncwarp();
        if (biased) {
          float sums[kColumns / 2];
#pragma unroll
          for (int i = 0; i < kColumns / 2; ++i)
            sums[i] = d[piece * kColumns / 2 + i] + bias_of(biases[piece * kColumns / 8 + i / 4], i % 2);
          columns_to_shared<Out>(buffer, sums, lane);
        } else {
          columns_to_shared<Out>(buffer, d + piece * kColumns / 2, lane);
        }
        if (whole) ptx::shared_proxy_fence();
        __syncwarp();
        if (!whole)
          store_rows(to + col * sizeof(Out), int64_t{problem.n} * sizeof(Out), tile.row_end - row,
                     (problem.n - col) * int{sizeof(Out)} / 16, buffer, lane);
        else if (lane == 0)
          store_box(map, {col, row, matrix}, buffer);
      }
      if (lane == 0) ptx::commit_stores();  // one group per piece, even if empty: wait_stores_read counts groups
    }
  }

 private:
  // The biases of a thread's columns: two of each 8. n is a multiple of 8.
  template <int kBlockN>
  JAX_EP_FN void read_biases(uint32_t (&biases)[kBlockN / 8], const Problem& problem, const Tile& tile,
                             int lane) const {
    const Out* const of_group = bias + int64_t{tile.group} * problem.n;
#pragma unroll
    for (int eight = 0; eight < kBlockN / 8; ++eight) {
      const int column = tile.out_col + eight * 8 + lane % 4 * 2;
      biases[eight] = column < problem.n ? *reinterpret_cast<const uint32_t*>(of_group + column) : 0;
    }
  }
  JAX_EP_FN static float bias_of(const uint32_t& both, int column) {
    return static_cast<float>(reinterpret_cast<const Out*>(&both)[column]);
  }
};

// Like StoreTile, with plain stores: the lanes of a warp call put(row, column, words) together, each with 16 bytes.
template <class Out, int kBlockN, class Put>
JAX_EP_FN void put_tile(const Problem& problem, const Tile& tile, const float (&d)[kBlockN / 2],
                        char (*buffers)[kOutBytes], int strip, int lane, Put put) {
  constexpr int kColumns = kSwizzleBytes / sizeof(Out), kValues = 16 / sizeof(Out);
  const int row = tile.row + strip * kOutRows;
#pragma unroll
  for (int piece = 0; piece < kBlockN / kColumns; ++piece) {
    const int column = tile.out_col + piece * kColumns + (lane & 7) * kValues;
    char* const buffer = buffers[piece & 1];
    columns_to_shared<Out>(buffer, d + piece * kColumns / 2, lane);
    __syncwarp();
#pragma unroll
    for (int smem_row = lane >> 3; smem_row < kOutRows; smem_row += 4)
      if (row + smem_row < tile.row_end && column < problem.n)
        put(row + smem_row, column, *reinterpret_cast<const uint4*>(buffer + swizzled(smem_row, lane & 7)));
  }
}

// With swapped operands, a warpgroup stores pieces of 64 rows by kSwizzleBytes of columns, through two buffers.
constexpr int kPieceRows = kWarpgroup * kOutRows, kPieceBytes = kPieceRows * kSwizzleBytes;
constexpr int kRowSlices = kMaxRows / kSlice;
template <class Memory>
JAX_EP_FN char* pieces_of(Memory& shared, int warpgroup) {
  return shared.out[warpgroup * kWarpgroup][0];
}

// Stores a warp's 16 columns of 16 rows, rounded and transposed: rows in shared memory are rows of the result. `d` has
// four values for each 8 rows: two of column lane / 4, two of column lane / 4 + 8.
template <class Out>
JAX_EP_FN void rows_to_shared(char* to, int smem_row, int column, const float* d, int lane) {
  if constexpr (sizeof(Out) == 2) {
    store_transposed(to + swizzled(smem_row + (lane >> 4) * 8 + (lane & 7), column / 8 + (lane >> 3 & 1)),
                     pack(d[0], d[1], Out{}), pack(d[2], d[3], Out{}), pack(d[4], d[5], Out{}),
                     pack(d[6], d[7], Out{}));
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int row = smem_row + i / 4 * 8 + (lane & 3) * 2 + i % 2, at = column + lane / 4 + i / 2 % 2 * 8;
      *reinterpret_cast<float*>(to + swizzled(row, at / 4) + at % 4 * 4) = d[i];
    }
  }
}

// A warp's 16 columns of a piece; `d` begins with the piece's first row.
template <class Out>
JAX_EP_FN void piece_to_shared(char* buffer, int column, const float* d, int lane) {
#pragma unroll
  for (int smem_row = 0; smem_row < kPieceRows; smem_row += 16)
    rows_to_shared<Out>(buffer, smem_row, column, d + smem_row / 2, lane);
}

// Stores a warp's part of a piece, at `from`: 16 rows from `row` on by kSwizzleBytes of columns from `col` on. `matrix`
// has rows of `columns` values. Rows from `row_end` on and columns from `col_end` on are not stored. TMA stores whole
// strips, and stops at the end of a row of the matrix. Where it would overwrite neighbours, the lanes store.
template <class Out>
JAX_EP_FN void store_strip(const CUtensorMap& map, Out* matrix, int columns, int row, int row_end, int col, int col_end,
                           const char* from, int lane) {
  constexpr int kColumns = kSwizzleBytes / sizeof(Out);
  if (row >= row_end || col >= col_end) return;
  const bool cut = col + kColumns > col_end && columns > col_end;
  if (row + kOutRows > row_end || cut)
    store_rows(reinterpret_cast<char*>(matrix + int64_t{row} * columns + col), int64_t{columns} * sizeof(Out),
               row_end - row, (col_end - col) * int{sizeof(Out)} / 16, from, lane);
  else if (lane == 0)
    store_box(map, {col, row, 0}, from);
}

// Stores a warpgroup's 64 columns of a tile of up to kRows rows, from `col` on, rounded to Out, to a matrix as in
// store_strip. For each piece, the warps write their columns to shared memory, then each warp stores 16 rows. The last
// stores may still read their buffer on return. `stored` counts the pieces of all tiles, so that the next tile begins
// with the buffer that is free first.
template <class Out, int kRows, class Memory>
JAX_EP_FN void store_columns(const CUtensorMap& map, void* matrix, int columns, int col, int col_end,
                             const RowTile& tile, const float (&d)[kRows / 2], Memory& shared, int& stored, int warp,
                             int lane) {
  constexpr int kColumns = kSwizzleBytes / sizeof(Out);
  const int warpgroup = warp / kWarpgroup, row_end = smaller(tile.row_end, tile.row + tile.rows);
  char* const buffers = pieces_of(shared, warpgroup);
#pragma unroll
  for (int piece = 0; piece < kRows / kSlice * (kSlice / kColumns); ++piece) {
    const int first = piece / (kSlice / kColumns) * kPieceRows, first_column = piece % (kSlice / kColumns) * kColumns;
    if (first >= tile.rows) break;
    const int column = warp % kWarpgroup * 16 - first_column;
    char* const buffer = buffers + stored++ % 2 * kPieceBytes;
    if (lane == 0) ptx::wait_stores_read<1>();  // stores of the other buffer may still run
    ptx::sync_some(1 + warpgroup, kWarpgroup * 32);
    if (column >= 0 && column < kColumns) piece_to_shared<Out>(buffer, column, d + first / 2, lane);
    ptx::shared_proxy_fence();
    ptx::sync_some(1 + warpgroup, kWarpgroup * 32);
    const int smem_row = warp % kWarpgroup * kOutRows;
    store_strip(map, static_cast<Out*>(matrix), columns, tile.row + first + smem_row, row_end, col + first_column,
                col_end, buffer + smem_row * kSwizzleBytes, lane);
    if (lane == 0) ptx::commit_stores();
  }
}

// The biases of a thread's two columns if the operands are swapped. They are read before the sums are computed, so that
// store() does not wait for them.
struct ColumnBiases {
  float values[2];
  bool any = false;

  // The 64 columns begin with `col`. Biases of columns from `col_end` on are not read.
  //
  // Args:
  //   bias: [groups, columns], or null. The bias of column i of the product is that of column `first` + i.
  template <class T>
  JAX_EP_FN void read(const void* bias, const Problem& problem, const RowTile& tile, int columns, int first, int col,
                      int col_end, int warp, int lane) {
    any = bias != nullptr && tile.group < problem.groups;
    if (!any) return;
    const T* const of_group = static_cast<const T*>(bias) + int64_t{tile.group} * columns + first;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int column = col + warp % kWarpgroup * 16 + half * 8 + lane / 4;
      values[half] = column < col_end ? static_cast<float>(of_group[column]) : 0;
    }
  }
  template <int kCount>
  JAX_EP_FN void add(float (&d)[kCount]) const {
    if (!any) return;
#pragma unroll
    for (int i = 0; i < kCount; ++i) d[i] += values[i / 2 % 2];
  }
};

template <class Out>
struct StoreSwapped {
  const CUtensorMap& map;
  void* out;
  const void* bias;
  mutable ColumnBiases biases[2];  // one per slab

  JAX_EP_FN StoreSwapped(const Maps& maps, const GroupedMatmul& product)
      : map(maps.result), out(product.result), bias(product.bias) {}

  // A warpgroup has 64 columns in each slab.
  template <int kSlabs>
  JAX_EP_FN void begin(const Problem& problem, const RowTile& tile, int warp, int lane) const {
    if constexpr (sizeof(Out) == 2)
#pragma unroll
      for (int slab = 0; slab < kSlabs; ++slab)
        biases[slab].read<Out>(bias, problem, tile, problem.n, 0, first_column<kSlabs>(tile, slab, warp), problem.n,
                               warp, lane);
  }
  template <int kSlabs, int kCount, class Memory>
  JAX_EP_FN void store(const Problem& problem, const RowTile& tile, float (&d)[kSlabs][kCount], Memory& shared,
                       int& stored, int warp, int lane) const {
#pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab) {
      if constexpr (sizeof(Out) == 2) biases[slab].add(d[slab]);
      store_columns<Out, 2 * kCount>(map, out, problem.n, first_column<kSlabs>(tile, slab, warp), problem.n, tile,
                                     d[slab], shared, stored, warp, lane);
    }
  }

 private:
  template <int kSlabs>
  JAX_EP_FN static int first_column(const RowTile& tile, int slab, int warp) {
    return tile.col + (warp / kWarpgroup * kSlabs + slab) * kSlice;
  }
};

// Transposed sums of tiles of fixed height, by groups of the contraction: result[group] is [n, m].
template <class Out>
struct StoreTransposed {
  const CUtensorMap& map;  // of the rows of all groups, as one matrix
  void* out;

  JAX_EP_FN StoreTransposed(const Maps& maps, const GroupedMatmul& product) : map(maps.result), out(product.result) {}

  template <int kSlabs, int kCount, class Memory>
  JAX_EP_FN void store(const Problem& problem, const Tile& tile, const float (&d)[kSlabs][kCount], Memory& shared,
                       int& stored, int warp, int lane) const {
    RowTile rows;
    rows.row = tile.group * problem.n + tile.col;
    rows.row_end = (tile.group + 1) * problem.n;
    rows.rows = 2 * kCount;
#pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab)
      store_columns<Out, 2 * kCount>(map, out, problem.m, tile.row + slab * kSlice, problem.m, rows, d[slab], shared,
                                     stored, warp, lane);
  }
};

}  // namespace jax_ep::gemm
