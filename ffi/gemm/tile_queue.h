// The tile pairs of a cluster if tiles differ in height (multiply_swapped.h). The first free cluster takes the next
// pair. If all tiles take equally long, the order is fixed.
#pragma once

#include "gemm/pipeline.h"
#include "gemm/row_schedule.h"

namespace jax_ep::gemm {

// Tiles of a CTA. A slot is free again when every warp of the cluster has read its tile.
struct TileQueue {
  static constexpr int kAhead = 2;
  RowTile tiles[kAhead];  // with group kNoTile after the last
  uint64_t full[kAhead], empty[kAhead];
};
constexpr int kNoTile = -1;

// One warp of a cluster takes tile pairs for all warps of both CTAs, and sends each CTA its tile. Cluster c begins with
// pair c. The numbers of later pairs come from `counter`, which starts at 0. Without a counter, a cluster adds the
// number of clusters to its last pair.
class TileFeeder {
 public:
  JAX_EP_FN TileFeeder(TileQueue& queue, const Problem& problem, int tile_columns, bool split, uint32_t* counter)
      : queue_(queue),
        lane_(threadIdx.x % 32),
        tiles_(problem, tile_columns, split, coop_of(lane_)),
        counter_(counter) {}

  // Waits until all warps have begun the tile of a slot, then takes the next pair. False after the last pair.
  JAX_EP_FN bool feed() {
    if (!more_) return false;
    wait_barrier(&queue_.empty[at_.stage], at_.parity ^ 1, "all warps to begin a tile");
    pair_ = next_pair();
    RowTile tile{};
    more_ = tiles_.find(pair_, lane_ % kCluster, &tile);
    if (!more_) tile.group = kNoTile;
    if (lane_ < kCluster) send_value(&queue_.tiles[at_.stage], lane_, tile, &queue_.full[at_.stage]);
    at_.advance();
    return more_;
  }

 private:
  JAX_EP_FN static Coop coop_of(int lane) {
    Coop warp{};
    warp.lane = lane;
    return warp;
  }
  JAX_EP_FN int next_pair() const {
    const int cluster = blockIdx.x / kCluster, clusters = gridDim.x / kCluster;
    if (pair_ < 0) return cluster;
    return clusters + (counter_ ? uniform(lane_ == 0 ? atomicAdd(counter_, 1) : 0) : pair_);
  }

  TileQueue& queue_;
  int lane_;
  RowTiles tiles_;
  uint32_t* counter_;
  int pair_ = -1;  // the last one taken
  bool more_ = true;
  PipelineState<TileQueue::kAhead> at_;
};

// A warp's view of the queue. next() returns false after the last tile.
class TakenTiles {
 public:
  JAX_EP_FN explicit TakenTiles(TileQueue& queue) : queue_(queue) {}

  JAX_EP_FN bool next(RowTile* tile) {
    wait_for_data(&queue_.full[at_.stage], at_.parity);
    *tile = queue_.tiles[at_.stage];
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive_at_peer(&queue_.empty[at_.stage], 0);
    at_.advance();
    return tile->group != kNoTile;
  }

 private:
  TileQueue& queue_;
  PipelineState<TileQueue::kAhead> at_;
};

// The tiles of a product with swapped operands.
struct QueuedTiles {
  using Tile = RowTile;
  struct SwappedMemory : Shared<kMaxRows> {
    TileQueue queue;
  };
  template <class>
  using Memory = SwappedMemory;

  // `readers`: how many aux warps of a CTA read tiles, besides the consumers and the producer.
  JAX_EP_FN static void open(SwappedMemory& shared, int readers) {
    for (int i = 0; i < TileQueue::kAhead; ++i) {
      ptx::init_barrier(&shared.queue.full[i], 1);
      ptx::init_barrier(&shared.queue.empty[i], (kConsumerWarps + 1 + readers) * kCluster);
    }
  }
  JAX_EP_FN static TakenTiles list(SwappedMemory& shared, const Problem&, Part) { return TakenTiles(shared.queue); }
  template <class Source>
  JAX_EP_FN static TileFeeder feeder(SwappedMemory& shared, const Source& source, const Problem& problem) {
    return TileFeeder(shared.queue, problem, Source::kColumns, Source::Weights::kWide, source.product.counter);
  }
  JAX_EP_FN static void close() { sync_cluster(); }  // the other CTA may still arrive at this one's barriers
};

}  // namespace jax_ep::gemm
