// Which tile pairs a cluster takes, for kernels that swap the operands (swap_ab.h): whoever is done first takes the
// next, when its rows are here, and the kernel behind learns what is written.
#pragma once

#include "comm/target/ptx/bulk.h"
#include "gemm/beside.h"
#include "gemm/load.h"
#include "gemm/row_schedule.h"

namespace jax_ep::gemm {

constexpr int kTileWarps = kConsumerWarps + 2;  // of a CTA that work on tiles: the producer and the teller, too

// Tile pairs that a cluster has taken and its warps have not all begun.
struct TileQueue {
  static constexpr int kAhead = 2;
  uint64_t taken[kAhead], begun[kAhead];
  // By warpgroup, one for each of the last tiles that it stored, in turns: they are written. The consumers may have
  // stored three tiles that the teller has not counted.
  static constexpr int kWritten = 4;
  uint64_t written[kConsumerWarps / kWarpgroup][kWritten];
  uint32_t pair[kAhead];
};

// One thread calls, before any other uses the queue.
JAX_EP_FN void open_queue(TileQueue& queue) {
  for (int i = 0; i < TileQueue::kAhead; ++i) {
    ptx::init_barrier(&queue.taken[i], 1);
    ptx::init_barrier(&queue.begun[i], kTileWarps * kCluster);
  }
  for (auto& of_warpgroup : queue.written)
    for (uint64_t& written : of_warpgroup) ptx::init_barrier(&written, kWarpgroup);
}

// What the groups have in all: tile pairs of `tile_columns` columns, and rows.
struct Totals {
  int pairs, rows;
};
// All lanes of a warp call together.
JAX_EP_FN Totals add_up(const Problem& problem, int tile_columns, int lane) {
  int tiles = 0, rows = 0;
  for (int group = lane; group < problem.groups; group += 32) {
    const int size = larger(problem.group_sizes[group], 0);
    tiles += ceil_div(size, kMostRows);
    rows += size;
  }
  tiles = __reduce_add_sync(~0u, tiles);
  rows = __reduce_add_sync(~0u, rows);
  return {tiles * ceil_div(problem.n, tile_columns * kCluster), smaller(rows, problem.m)};
}

// Waits until a tile's rows of the left operand are here, of which the groups have `rows` in all. Returns whether they
// are wanted: not where the kernel before has brought nothing. All lanes of a warp call.
JAX_EP_FN bool await_rows(const Beside& beside, const RowTile& tile, int rows, int lane) {
  const int end = smaller(smaller(tile.row + tile.rows, tile.row_end), rows);
  if (!beside.arrived) return true;
  const int block = tile.row / kBlockM + lane, first = block * kBlockM;
  static_assert(kMostRows / kBlockM < 32, "a lane for each block of a tile");
  uint64_t over = load_acquire(beside.over);
  if (first < end) {
    const auto whole = static_cast<uint64_t>(smaller(kBlockM, rows - first));
    for (; !over && load_acquire(&beside.arrived[block]) < whole; over = load_acquire(beside.over)) pause(0);
  }
  ptx::proxy_fence();  // TMA loads what others may have stored
  return !__any_sync(~0u, over == Beside::kNothing);
}

// One warp of a cluster takes tile pairs off `counter`, for all warps of both CTAs: tiles differ in height, and whoever
// is done first takes the next. This warp alone waits for rows, before it hands a tile on; clusters that begin late
// find fewer tiles left.
template <class Operands>
JAX_EP_FN void take_tiles(TileQueue& queue, const Problem& problem, const Beside& beside, uint32_t* counter, int lane) {
  constexpr int kNoPair = 1 << 30;
  const bool leaves = static_cast<int>(blockIdx.x) < beside.leaving;
  const Totals totals = leaves || beside.arrived ? add_up(problem, Operands::kColumns, lane) : Totals{};
  const int most = leaves ? totals.pairs - beside.tail : kNoPair;
  RowTiles tiles(problem, Operands::kColumns);
  RowTile tile;
  bool is_last = false;
  int pair = 0;
  for (Position<TileQueue::kAhead> at; !is_last; at.advance()) {
    wait_barrier(&queue.begun[at.stage], at.parity ^ 1, "all warps to begin a tile");
    pair = pair >= most ? kNoPair : uniform(lane == 0 ? atomicAdd(counter, 1) : 0);
    is_last = !tiles.find(pair, 0, &tile);
    if (!is_last && !await_rows(beside, tile, totals.rows, lane)) {
      pair = kNoPair;
      is_last = true;
    }
    if (lane < kCluster) send_word(&queue.pair[at.stage], lane, pair, &queue.taken[at.stage]);
  }
}

// The tiles of a CTA for one of its warps.
template <class Operands>
class TakenTiles {
 public:
  JAX_EP_FN TakenTiles(TileQueue& queue, const Problem& problem)
      : queue_(queue), tiles_(problem, Operands::kColumns), rank_(blockIdx.x % kCluster), lane_(threadIdx.x % 32) {}

  // False behind the last tile.
  JAX_EP_FN bool next(RowTile* tile) {
    wait_barrier(&queue_.taken[at_.stage], at_.parity, "a tile");
    const int pair = queue_.pair[at_.stage];
    __syncwarp();
    if (lane_ == 0) arrive_at_peer(&queue_.begun[at_.stage], 0);
    at_.advance();
    return tiles_.find(pair, rank_, tile);
  }

 private:
  TileQueue& queue_;
  RowTiles tiles_;
  int rank_, lane_;
  Position<TileQueue::kAhead> at_;
};

// By one warp of each CTA: counts what the consumers of its CTA have stored of each tile, when it is written, for the
// kernel behind. No consumer pays for the order between them and that kernel.
template <class Operands>
JAX_EP_FN void tell_stored(TileQueue& queue, const Operands& operands, const Problem& problem, const Beside& beside,
                           int lane) {
  TakenTiles<Operands> tiles(queue, problem);
  Position<TileQueue::kWritten> stored[kConsumerWarps / kWarpgroup];
  for (RowTile tile; tiles.next(&tile);) {
    if (!beside.stored) continue;
    const int slices = operands.slices(problem, tile);
#pragma unroll
    for (int i = 0; i < kConsumerWarps / kWarpgroup; ++i) {
      if (i >= slices) continue;
      wait_barrier(&queue.written[i][stored[i].stage], stored[i].parity, "written stores");
      stored[i].advance();
    }
    if (slices == 0) continue;
    ptx::proxy_fence();
    const int columns = smaller(slices * kSlice, problem.n - tile.col);
    const int row_end = smaller(tile.row_end, tile.row + tile.rows);
    if (lane == 0)
      each_row_block(tile.row, row_end, [&](int block, int rows) {
        fetch_add(&beside.stored[block], static_cast<uint64_t>(rows * columns));
      });
  }
}

}  // namespace jax_ep::gemm
