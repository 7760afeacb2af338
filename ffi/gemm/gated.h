// Gated units in one product: activation(rows x gate) * (rows x up), of a kernel that swaps the operands (swap_ab.h).
// One warpgroup multiplies 64 columns of gate and the other the same columns of up. They leave both products, rounded,
// in shared memory, where all threads find them, and from where TMA stores them if a backward pass wants them.
#pragma once

#include "gemm/activation.h"
#include "gemm/swap_ab.h"

namespace jax_ep::gemm {

// Both of every group are stored [k, n]; the columns of up begin at `up_column` of its map.
struct GateAndUp {
  static constexpr int kColumns = kSlice, kTerms = 1;
  static constexpr bool kMn = true;
  const CUtensorMap &row_map, &gate, &up;
  int up_column;

  JAX_EP_FN const CUtensorMap& rows(int /*term*/) const { return row_map; }
  JAX_EP_FN int slices(const Problem& problem, const RowTile& tile) const { return tile.col < problem.n ? 2 : 0; }
  JAX_EP_FN void load(char* to, const RowTile& tile, int /*term*/, int k, int slices, uint64_t* full) const {
    if (slices == 0) return;
    load_box(to, gate, {tile.col, k, tile.group}, full);
    load_box(to + kSliceBytes, up, {up_column + tile.col, k, tile.group}, full);
  }
};

// Where the products by gate and up are kept: matrices of `columns` values a row, or one for both, in which up begins
// at `up_column`. None is kept if `columns` is 0.
template <class T>
struct Kept {
  CUtensorMap gate_map, up_map;
  T *gate, *up;
  int columns, up_column;
};

// The warps of both warpgroups call it together. Before all threads meet, each warp waits until TMA has read what it
// stored of the chunk before: so behind the meeting the other buffer is free.
template <class T, Activation kActivation>
struct StoreGated {
  static_assert(kConsumers == 8 * kChunkRows / 2, "a thread has 16 bytes of each half of a chunk");
  using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
  T* out;
  const Kept<T>& kept;
  int chunks = 0;

  JAX_EP_FN void operator()(const Problem& problem, const RowTile& tile, const float (&d)[kMostRows / 2],
                            SwapMemory& shared, int warp, int lane) {
    const int row_end = smaller(tile.row_end, tile.row + tile.rows);
#pragma unroll
    for (int chunk = 0; chunk < kRowSlices; ++chunk) {
      const int first = chunk * kChunkRows;
      if (first >= tile.rows) break;
      const int buffer = chunks++ % 2 * kChunkBytes;
      char* const own = chunks_of(shared, warp / kWarpgroup) + buffer;
      stage_chunk<T>(own, warp % kWarpgroup * 16, d + first / 2, lane);
      if (kept.columns > 0) {
        ptx::shared_proxy_fence();
        if (lane == 0) ptx::wait_stores_read<0>();
      }
      ptx::sync_some(1, kConsumers);
      if (kept.columns > 0) keep(problem, tile, first, row_end, own, warp, lane);
      const char *const gate = chunks_of(shared, 0) + buffer, *const up = chunks_of(shared, 1) + buffer;
      const int vec = threadIdx.x % 8, col = tile.col + vec * 8;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int line = half * kChunkRows / 2 + threadIdx.x / 8, row = tile.row + first + line;
        if (row >= row_end || col >= problem.n) continue;
        const uint4 of_gate = *reinterpret_cast<const uint4*>(gate + swizzled(line, vec));
        const uint4 of_up = *reinterpret_cast<const uint4*>(up + swizzled(line, vec));
        *reinterpret_cast<uint4*>(out + int64_t{row} * problem.n + col) = gated<kActivation, Pair>(of_gate, of_up);
      }
    }
  }

 private:
  // A warp's 16 rows of its warpgroup's product, which is staged in `own`.
  JAX_EP_FN void keep(const Problem& problem, const RowTile& tile, int first, int row_end, const char* own, int warp,
                      int lane) const {
    const int line = warp % kWarpgroup * kOutRows, row = tile.row + first + line;
    const char* const from = own + line * kLineBytes;
    if (warp < kWarpgroup)
      store_strip(kept.gate_map, kept.gate, kept.columns, row, row_end, tile.col, problem.n, from, lane);
    else
      store_strip(kept.up_map, kept.up, kept.columns, row, row_end, kept.up_column + tile.col,
                  kept.up_column + problem.n, from, lane);
    if (lane == 0) ptx::commit_stores();
  }
};

// `gate` and `up` [groups, K, ..] and `rows` [M, K] map slices, the maps in `kept` a warp's box; `counter` is zero.
template <class T, Activation kActivation>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    gated_kernel(const __grid_constant__ CUtensorMap rows, const __grid_constant__ CUtensorMap gate,
                 const __grid_constant__ CUtensorMap up, int up_column, void* out, const __grid_constant__ Kept<T> kept,
                 uint32_t* counter, const __grid_constant__ Problem problem) {
  extern __shared__ __align__(1024) char memory[];
  multiply_swapped<T>(memory, GateAndUp{rows, gate, up, up_column},
                      StoreGated<T, kActivation>{static_cast<T*>(out), kept}, counter, problem);
}

}  // namespace jax_ep::gemm
