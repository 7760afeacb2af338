// Which tile pairs a cluster takes where tiles differ in height (multiply_swapped.h): whoever is done first takes the
// next.
#pragma once

#include "gemm/pipeline.h"
#include "gemm/row_schedule.h"

namespace jax_ep::gemm {

constexpr int kTileWarps = kConsumerWarps + 1;  // of a CTA that work on tiles: the producer, too

// Tile pairs that a cluster has taken and its warps have not all begun.
struct TileQueue {
  static constexpr int kAhead = 2;
  uint64_t taken[kAhead], begun[kAhead];
  uint32_t pair[kAhead];
};

// One thread calls, before any other uses the queue.
JAX_EP_FN void open_queue(TileQueue& queue) {
  for (int i = 0; i < TileQueue::kAhead; ++i) {
    ptx::init_barrier(&queue.taken[i], 1);
    ptx::init_barrier(&queue.begun[i], kTileWarps * kCluster);
  }
}

// One warp of a cluster takes tile pairs off `counter`, for all warps of both CTAs.
JAX_EP_FN void take_tiles(TileQueue& queue, const Problem& problem, int tile_columns, uint32_t* counter, int lane) {
  RowTiles tiles(problem, tile_columns);
  RowTile tile;
  bool more = true;
  for (Position<TileQueue::kAhead> at; more; at.advance()) {
    wait_barrier(&queue.begun[at.stage], at.parity ^ 1, "all warps to begin a tile");
    const int pair = uniform(lane == 0 ? atomicAdd(counter, 1) : 0);
    more = tiles.find(pair, 0, &tile);
    if (lane < kCluster) send_word(&queue.pair[at.stage], lane, pair, &queue.taken[at.stage]);
  }
}

// The tiles of a CTA for one of its warps.
class TakenTiles {
 public:
  JAX_EP_FN TakenTiles(TileQueue& queue, const Problem& problem, int tile_columns)
      : queue_(queue), tiles_(problem, tile_columns), rank_(blockIdx.x % kCluster), lane_(threadIdx.x % 32) {}

  // False behind the last tile.
  JAX_EP_FN bool next(RowTile* tile) {
    wait_for_data(&queue_.taken[at_.stage], at_.parity);
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

// The shared memory of a CTA.
struct SwappedMemory : Shared<kMostRows> {
  TileQueue queue;
};

}  // namespace jax_ep::gemm
