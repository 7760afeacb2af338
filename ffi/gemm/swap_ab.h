// Products whose rows are in groups, with the operands swapped ("swap AB", as DeepGEMM and CUTLASS call it): wgmma
// takes 64 columns of the weights as its rows, and a multiple of kRowStep rows of the tokens as its columns. So a tile
// has as many rows as its group has left, where tiles of fixed height waste half of one per group.
//
// A CTA has 128 columns of weights, 64 for each of two cooperative warpgroups. Both CTAs of a cluster have the same
// rows, which they load once. The pipeline is that of kernel.h.
//
// Operands say where a tile's rows and its columns of weights are: one matrix here, two in gated.h, and in summed.h two
// pairs of rows and weights (kTerms), whose products add up. Store says what becomes of the sums.
#pragma once

#include "gemm/kernel.h"
#include "gemm/tile_queue.h"

namespace jax_ep::gemm {

struct SwapMemory : Shared<kMostRows> {
  TileQueue queue;
};
constexpr int kRowSlices = kMostRows / kSlice;

// One matrix of weights per group: 128 columns, stored [k, n] if kStoredKN.
template <bool kStoredKN>
struct OneMatrix {
  static constexpr int kColumns = kTileColumns;
  static constexpr int kTerms = 1;  // pairs of rows and weights whose products add up
  static constexpr bool kMn = kStoredKN;
  const CUtensorMap &row_map, &map;

  JAX_EP_FN const CUtensorMap& rows(int /*term*/) const { return row_map; }
  // How many slices of 64 columns the tile has; warpgroup i multiplies the i-th.
  JAX_EP_FN int slices(const Problem& problem, const RowTile& tile) const {
    return larger(0, smaller(ceil_div(problem.n - tile.col, kSlice), kSlicesA));
  }
  JAX_EP_FN void load(char* to, const RowTile& tile, int /*term*/, int k, int slices, uint64_t* full) const {
    load_slices<kMn, kSlicesA>(to, map, tile.col, k, tile.group, slices, /*once=*/false, /*shared=*/false, 0, full);
  }
};

// Loads the operands of a tile's product, the term-th.
template <class Operands>
JAX_EP_FN void load_term(SwapMemory& shared, const Operands& operands, const RowTile& tile, int term, int slices,
                         Position<SwapMemory::kStages>& at) {
  const int rank = blockIdx.x % kCluster, lines = ceil_div(tile.rows, kSlice);
  for (int k = 0; k < tile.k_end; k += kBlockK, at.advance()) {
    char* const stage = shared.stages[at.stage];
    uint64_t* const full = &shared.full[at.stage];
    wait_barrier(&shared.empty[at.stage], at.parity ^ 1, "an empty stage");
    if (!elect_lane()) continue;
    ptx::arrive_expecting(full, (slices + lines) * kSliceBytes);
    operands.load(stage, tile, term, k, slices, full);
    load_slices<false, kRowSlices>(stage + kSlicesA * kSliceBytes, operands.rows(term), tile.row, k, 0, lines,
                                   /*once=*/false, /*shared=*/true, rank, full);
  }
}

template <class Operands>
__device__ void produce_swapped(SwapMemory& shared, const Operands& operands, const Problem& problem) {
  Position<SwapMemory::kStages> at;
  TakenTiles<Operands> tiles(shared.queue, problem);
  for (RowTile tile; tiles.next(&tile);) {
    const int slices = operands.slices(problem, tile);
    for (int term = 0; term < Operands::kTerms; ++term) load_term(shared, operands, tile, term, slices, at);
  }
  for (int stage = 0; stage < SwapMemory::kStages; ++stage, at.advance())
    wait_barrier(&shared.empty[at.stage], at.parity ^ 1, "the last of both CTAs' consumers");
}

// How much contraction the stages of a tile hold: each term begins with a stage, and TMA fills its last one up with
// zeros.
template <class Operands>
JAX_EP_FN int contraction_of(const RowTile& tile) {
  return Operands::kTerms * align_up(tile.k_end, kBlockK);
}

// d = the sums of a warpgroup's 64 columns and `rows` rows: a multiple of kRowStep, at least kRows.
template <class In, int kRows, bool kMn, int kCount>
JAX_EP_FN int multiply_rows(float (&d)[1][kCount], SwapMemory& shared, int rows, int k_end,
                            Position<SwapMemory::kStages>& at, int warpgroup, int lane) {
  if constexpr (kRows > kMostRows) {
    return -1;
  } else {
    if (rows > kRows) return multiply_rows<In, kRows + kRowStep, kMn>(d, shared, rows, k_end, at, warpgroup, lane);
    return multiply_stages<In, kRows, 1, kMn, false>(d, shared, 0, k_end, at, warpgroup, lane);
  }
}

template <class In, bool kMn>
JAX_EP_FN void accumulate_swapped(float (&d)[1][kMostRows / 2], SwapMemory& shared, int rows, int k_end,
                                  Position<SwapMemory::kStages>& at, int warpgroup, int lane) {
  if (k_end == 0) {
#pragma unroll
    for (float& value : d[0]) value = 0;
    return;
  }
  leave_undefined(d[0]);
  const int running = multiply_rows<In, kRowStep, kMn>(d, shared, rows, k_end, at, warpgroup, lane);
  wait_multiplies<0>();
  settle(d[0]);
  if (running >= 0) release(&shared.empty[running], lane);
}

// Results leave in chunks of 64 rows and a line of columns, through two buffers of each warpgroup.
constexpr int kChunkRows = kWarpgroup * kOutRows, kChunkBytes = kChunkRows * kLineBytes;
JAX_EP_FN char* chunks_of(SwapMemory& shared, int warpgroup) { return shared.out[warpgroup * kWarpgroup][0]; }

// A warp's 16 columns of 16 rows, rounded and transposed: lines of `to` are rows. `d` has four values for each 8 rows:
// two rows of column lane / 4, the same of that column + 8.
template <class Out>
JAX_EP_FN void stage_rows(char* to, int line, int column, const float* d, int lane) {
  if constexpr (sizeof(Out) == 2) {
    store_transposed(to + swizzled(line + (lane >> 4) * 8 + (lane & 7), column / 8 + (lane >> 3 & 1)),
                     pack(d[0], d[1], Out{}), pack(d[2], d[3], Out{}), pack(d[4], d[5], Out{}),
                     pack(d[6], d[7], Out{}));
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int row = line + i / 4 * 8 + (lane & 3) * 2 + i % 2, at = column + lane / 4 + i / 2 % 2 * 8;
      *reinterpret_cast<float*>(to + swizzled(row, at / 4) + at % 4 * 4) = d[i];
    }
  }
}

// A warp's 16 columns of a chunk. `d` begins with its rows.
template <class Out>
JAX_EP_FN void stage_chunk(char* buffer, int column, const float* d, int lane) {
#pragma unroll
  for (int line = 0; line < kChunkRows; line += 16) stage_rows<Out>(buffer, line, column, d + line / 2, lane);
}

// A warp's 16 rows of a chunk, from `row` on, and a line of columns from `col` on, as they are staged at `from`: to a
// matrix of `columns` values a row, of which those before `col_end` and the rows before `row_end` are wanted. By TMA
// where that writes nothing else: it stops where the matrix' rows end.
template <class Out>
JAX_EP_FN void store_strip(const CUtensorMap& map, Out* matrix, int columns, int row, int row_end, int col, int col_end,
                           const char* from, int lane) {
  constexpr int kColumns = kLineBytes / sizeof(Out);
  if (row >= row_end || col >= col_end) return;
  const bool cut = col + kColumns > col_end && columns > col_end;
  if (row + kOutRows > row_end || cut)
    store_lines(reinterpret_cast<char*>(matrix + int64_t{row} * columns + col), int64_t{columns} * sizeof(Out),
                row_end - row, (col_end - col) * int{sizeof(Out)} / 16, from, lane);
  else if (lane == 0)
    store_box(map, {col, row, 0}, from);
}

// A warpgroup's 64 columns of a tile, in chunks of 64 rows and a line: its warps stage their columns, then each stores
// 16 of the rows. The last stores still read `buffers`, two of 64 lines, when it returns: `chunks` counts those of all
// tiles, so that the next one begins with the buffer that was read first.
template <class Out>
JAX_EP_FN void store_swapped(const CUtensorMap& map, Out* out, const Problem& problem, const RowTile& tile,
                             const float (&d)[kMostRows / 2], char* buffers, int& chunks, int warp, int lane) {
  constexpr int kColumns = kLineBytes / sizeof(Out);
  const int warpgroup = warp / kWarpgroup, row_end = smaller(tile.row_end, tile.row + tile.rows);
#pragma unroll
  for (int chunk = 0; chunk < kRowSlices * (kSlice / kColumns); ++chunk) {
    const int first = chunk / (kSlice / kColumns) * kChunkRows, part = chunk % (kSlice / kColumns) * kColumns;
    if (first >= tile.rows) break;
    const int col = tile.col + warpgroup * kSlice + part, column = warp % kWarpgroup * 16 - part;
    char* const buffer = buffers + chunks++ % 2 * kChunkBytes;
    if (lane == 0) ptx::wait_stores_read<1>();  // the other buffer's may go on
    ptx::sync_some(1 + warpgroup, kWarpgroup * 32);
    if (column >= 0 && column < kColumns) stage_chunk<Out>(buffer, column, d + first / 2, lane);
    ptx::shared_proxy_fence();
    ptx::sync_some(1 + warpgroup, kWarpgroup * 32);
    const int line = warp % kWarpgroup * kOutRows;
    store_strip(map, out, problem.n, tile.row + first + line, row_end, col, problem.n, buffer + line * kLineBytes,
                lane);
    if (lane == 0) ptx::commit_stores();
  }
}

// The sums as they are.
template <class Out>
struct StoreSums {
  const CUtensorMap& map;
  Out* out;
  int chunks = 0;

  JAX_EP_FN void operator()(const Problem& problem, const RowTile& tile, const float (&d)[kMostRows / 2],
                            SwapMemory& shared, int warp, int lane) {
    store_swapped(map, out, problem, tile, d, chunks_of(shared, warp / kWarpgroup), chunks, warp, lane);
  }
};

template <class In, class Operands, class Store>
__device__ void consume_swapped(SwapMemory& shared, const Problem& problem, const Operands& operands, Store store) {
  const int warp = uniform(threadIdx.x / 32), warpgroup = warp / kWarpgroup, lane = threadIdx.x % 32;
  Position<SwapMemory::kStages> at;
  TakenTiles<Operands> tiles(shared.queue, problem);
  for (RowTile tile; tiles.next(&tile);) {
    const int k_end = contraction_of<Operands>(tile);
    if (warpgroup < operands.slices(problem, tile)) {
      float d[1][kMostRows / 2];
      accumulate_swapped<In, Operands::kMn>(d, shared, tile.rows, k_end, at, warpgroup, lane);
      store(problem, tile, d[0], shared, warp, lane);
    } else {
      skip(shared, k_end, at, lane);
    }
  }
  if (lane == 0) ptx::wait_stores_written<0>();  // shared memory goes with the CTA; others look at the result
}

// The whole part of a CTA; `counter` is zero.
template <class In, class Operands, class Store>
JAX_EP_FN void multiply_swapped(char* memory, const Operands& operands, const Store& store, uint32_t* counter,
                                const Problem& problem) {
  using Wanted = Registers<Nothing, kMostRows / 2>;
  auto& shared = *reinterpret_cast<SwapMemory*>(memory);
  const int warp = uniform(threadIdx.x / 32);
  if (threadIdx.x == 0) open_queue(shared.queue);
  open_pipeline(shared, kConsumerWarps);
  if (warp < kConsumerWarps) {
    take_registers<Wanted::kConsumer>();
    consume_swapped<In>(shared, problem, operands, store);
  } else {
    give_registers<Wanted::kOther>();
    if (warp == kConsumerWarps) produce_swapped(shared, operands, problem);
    if (warp == kConsumerWarps + 1 && blockIdx.x % kCluster == 0)
      take_tiles<Operands>(shared.queue, problem, counter, threadIdx.x % 32);
  }
  sync_cluster();  // until nobody arrives at barriers of the other CTA
}

// `rows` [M, K] and `weights` [groups, K, N] if kMn, or [groups, N, K], map slices, `out_map` a warp's box.
template <class In, class Out, bool kMn>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    swapped_kernel(const __grid_constant__ CUtensorMap rows, const __grid_constant__ CUtensorMap weights,
                   const __grid_constant__ CUtensorMap out_map, void* out, uint32_t* counter,
                   const __grid_constant__ Problem problem) {
  extern __shared__ __align__(1024) char memory[];
  multiply_swapped<In>(memory, OneMatrix<kMn>{rows, weights}, StoreSums<Out>{out_map, static_cast<Out*>(out)}, counter,
                       problem);
}

}  // namespace jax_ep::gemm
