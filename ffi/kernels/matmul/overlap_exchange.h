// One kernel for a product and its reduction among two ranks. Both take the same tiles in the same order, so every
// block exchanges its own with the same block at the peer. Multiplying warps store their part of a tile here and there;
// of the warps beside them one announces it, the others add what has landed. The last tile is added by those who
// multiply.
#pragma once

#include "kernels/matmul/exchange.h"
#include "kernels/matmul/overlap.h"

namespace jax_ep {
// What the warps of a block tell each other, in shared memory.
struct Exchanged {
  char* landing;                           // at the peer, or null if nothing may be pushed
  uint32_t posted;                         // whether that is known
  uint32_t written[gemm::kConsumerWarps];  // parts of tiles, by multiplying warp: one may be ahead of another
  uint32_t added[gemm::kConsumerWarps];    // of the last tile
  uint32_t landed;                         // whether the peer's last tile is here, or never will be
};

template <>
struct BesideOf<MatmulExchangeArgs> {
  using Type = Exchanged;
};

// Tiles of a block are announced one by one, or a few at a time where flags do not suffice.
struct TileFlags {
  int block, blocks, tiles_per_flag;

  JAX_EP_FN TileFlags(const gemm::Problem& problem, int block_n, int block, int blocks) : block(block), blocks(blocks) {
    const int tiles = ceil_div(problem.m, gemm::kBlockM) * ceil_div(problem.n, block_n);
    const int most = ceil_div(tiles * (problem.split_k ? gemm::kCluster : 1), blocks) + 1;
    tiles_per_flag = ceil_div(most, kMaxFlags / blocks);
  }
  JAX_EP_FN int flag(int tile) const { return tile / tiles_per_flag * blocks + block; }
  JAX_EP_FN bool ends(int tile) const { return tile % tiles_per_flag == tiles_per_flag - 1; }
};

template <class Out, int kBlockN>
struct ExchangeBeside {
  static constexpr bool kStores = true, kAwaitStores = false;
  using Beside = Exchanged;
  using T = typename RowOf<Out>::Type;

  const Work<MatmulExchangeArgs>& work;
  const gemm::Problem& problem;
  Exchanged& beside;
  int block, blocks;
  MatmulExchange<T> exchange{work.comm, work.args};
  TileFlags flags{problem, kBlockN, block, blocks};

  JAX_EP_FN gemm::Rows before_tile(const gemm::Tile& tile, const CUtensorMap& a) const { return {a, tile.row}; }

  template <int kWidth>
  JAX_EP_FN void store(const gemm::Tile& tile, const float (&d)[kWidth / 2], char (*buffers)[gemm::kOutBytes], int slot,
                       int lane) const {
    ptx::wait_count(&beside.posted, 1);
    T* const landing = reinterpret_cast<T*>(beside.landing);
    gemm::put_tile<Out, kWidth>(problem, tile, d, buffers, slot, lane, [&](int row, int column, const uint4& words) {
      if (exchange.keeps(row)) *reinterpret_cast<uint4*>(exchange.kept(row, column)) = words;
      if (landing && exchange.sends(row)) *reinterpret_cast<uint4*>(exchange.sent(landing, row, column)) = words;
    });
  }
  JAX_EP_FN void after_tile(const gemm::Tile&, int warp) const { count(&beside.written[warp]); }
  JAX_EP_FN void after_last(const gemm::Tile& tile, int tiles, int warp) const {
    const int row = tile.row + warp * gemm::kOutRows;
    ptx::wait_count(&beside.landed, 1);
    if (tiles > 0) {
      wait_written(beside.written, kBlockN, tiles - 1);
      exchange.add(multiplying_team(), {row, row + gemm::kOutRows}, {tile.out_col, tile.out_end});
    }
    count(&beside.added[warp]);
  }
  JAX_EP_FN void run_beside(int warp, int, int) const {
    const Team team = multiplying_team();
    Op op(work.comm, team, kind_of(work.args));
    if (warp == 0)
      announce_tiles(op);
    else
      add_tiles(op, warp - 1);
    const Buffer results[] = {{work.args.result, result_bytes(work.args, work.comm.size)}};
    op.finish(results, blocks * gemm::kWarpsBeside);
  }

 private:
  static constexpr int kAdders = gemm::kWarpsBeside - 1;

  JAX_EP_FN static void count(uint32_t* counter) {
    __syncwarp();
    if (threadIdx.x % Team::lanes == 0) ptx::count_one(counter);
  }

  JAX_EP_FN void announce_tiles(Op& op) const {
    op.record_begin(block == 0);
    if (block == 0) op.post_by(true, work.args.partial);
    exchange.count_received(op, block == 0);
    op.wait_posted();
    if (op.team.lane == 0) beside.landing = op.ok() ? reinterpret_cast<char*>(exchange.landing(op)) : nullptr;
    count(&beside.posted);
    gemm::Schedule schedule(problem, kBlockN, block, blocks);
    int tiles = 0;
    for (gemm::Tile tile; schedule.next(&tile); ++tiles) {
      wait_written(beside.written, kBlockN, tiles);
      if (tile.last || flags.ends(tiles)) op.deliver(flags.flag(tiles), 1, 1);
    }
    if (tiles > 0) op.wait_delivered(exchange.peer, flags.flag(tiles - 1));
    count(&beside.landed);
    ptx::wait_counts(beside.added, gemm::kConsumerWarps, 1);
  }

  // A part of the rows of all tiles but the last, as they come.
  JAX_EP_FN void add_tiles(Op& op, int adder) const {
    const Range part = share(gemm::kBlockM, adder, kAdders);
    gemm::Schedule schedule(problem, kBlockN, block, blocks);
    int tiles = 0;
    for (gemm::Tile tile; schedule.next(&tile); ++tiles) {
      if (tile.last) break;
      op.wait_delivered(exchange.peer, flags.flag(tiles));
      wait_written(beside.written, kBlockN, tiles);
      if (op.ok()) exchange.add(op.team, {tile.row + part.begin, tile.row + part.end}, {tile.out_col, tile.out_end});
    }
  }
};

// Debug: the result is filled before anything is stored there.
JAX_EP_FN void poison_result(const Work<MatmulExchangeArgs>& work) {
  if (!work.comm.poison) return;
  const Team team = sharing_team(threadIdx.x / Team::lanes, kTeamsPerBlock, gridDim.x);
  const Buffer results[] = {{work.args.result, result_bytes(work.args, work.comm.size)}};
  Op(work.comm, team, kind_of(work.args)).poison(results);
}

template <class In, class Out, int kBlockN, bool kMnB>
JAX_EP_FN void run_overlapped(char* memory, const Operands& operands, const Work<MatmulExchangeArgs>& work) {
  poison_result(work);
  Exchanged& beside = reinterpret_cast<gemm::Shared<kBlockN, Exchanged>*>(memory)->beside;
  if (threadIdx.x == 0) beside = {};  // before all warps meet
  const int block = blockIdx.x, blocks = gridDim.x;
  const ExchangeBeside<Out, kBlockN> hooks{work, operands.problem, beside, block, blocks};
  gemm::multiply_tiles<In, Out, kBlockN, false, kMnB>(memory, operands.a, operands.b, operands.out_map, operands.out,
                                                      operands.problem, hooks, block, blocks);
}

}  // namespace jax_ep
