// Which tile pairs a cluster takes if tiles differ in height (multiply_swapped.h): the cluster that is done first takes
// the next pair.
#pragma once

#include "gemm/pipeline.h"
#include "gemm/row_schedule.h"

namespace jax_ep::gemm {

// Tile pairs that a cluster has taken and that not all of its warps have begun.
struct TileQueue {
  static constexpr int kAhead = 2;
  uint64_t full[kAhead], empty[kAhead];
  uint32_t pair[kAhead];
};

// One thread calls, before any other uses the queue. `warps`: how many warps of each CTA work on tiles.
JAX_EP_FN void open_queue(TileQueue& queue, int warps) {
  for (int i = 0; i < TileQueue::kAhead; ++i) {
    ptx::init_barrier(&queue.full[i], 1);
    ptx::init_barrier(&queue.empty[i], warps * kCluster);
  }
}

// One warp of a cluster takes tile pairs off `counter`, for all warps of both CTAs.
class TileTaker {
 public:
  JAX_EP_FN TileTaker(TileQueue& queue, const Problem& problem, int tile_columns, bool split, uint32_t* counter)
      : queue_(queue), tiles_(problem, tile_columns, split), counter_(counter), lane_(threadIdx.x % 32) {}

  // Waits until all warps have begun the pair before the last, then takes the next pair. False after the last pair.
  JAX_EP_FN bool take() {
    if (!more_) return false;
    wait_barrier(&queue_.empty[at_.stage], at_.parity ^ 1, "all warps to begin a tile");
    const int pair = uniform(lane_ == 0 ? atomicAdd(counter_, 1) : 0);
    RowTile tile;
    more_ = tiles_.find(pair, 0, &tile);
    if (lane_ < kCluster) send_word(&queue_.pair[at_.stage], lane_, pair, &queue_.full[at_.stage]);
    at_.advance();
    return more_;
  }

 private:
  TileQueue& queue_;
  RowTiles tiles_;
  uint32_t* counter_;
  int lane_;
  bool more_ = true;
  PipelineState<TileQueue::kAhead> at_;
};

// The tiles of a CTA, as each of its warps takes them from the queue. next() returns false after the last.
class TakenTiles {
 public:
  JAX_EP_FN TakenTiles(TileQueue& queue, const Problem& problem, int tile_columns, bool split)
      : queue_(queue), tiles_(problem, tile_columns, split) {}

  JAX_EP_FN bool next(RowTile* tile) {
    wait_for_data(&queue_.full[at_.stage], at_.parity);
    const int pair = queue_.pair[at_.stage];
    __syncwarp();
    if (lane_ == 0) arrive_at_peer(&queue_.empty[at_.stage], 0);
    at_.advance();
    return tiles_.find(pair, cta_in_cluster_, tile);
  }

 private:
  TileQueue& queue_;
  RowTiles tiles_;
  int cta_in_cluster_ = blockIdx.x % kCluster, lane_ = threadIdx.x % 32;
  PipelineState<TileQueue::kAhead> at_;
};

struct SwappedMemory : Shared<kMaxRows> {
  TileQueue queue;
};

}  // namespace jax_ep::gemm
