// One kernel for a product and its reduction. All blocks multiply; a warp of each announces what its block has written,
// and in the first blocks two more reduce what is ready. So the product keeps all processors, and those of the other
// blocks are free for other kernels as soon as it is done, whatever peers do.
#pragma once

#include "kernels/matmul/overlap.h"
#include "kernels/matmul/reduce.h"

namespace jax_ep {

constexpr int kReducersPerBlock = gemm::kWarpsBeside - 1;
constexpr int kReducerBytes = 128 + 8 * 2048;  // two batches to write, six to read

// Of the warps beside the product, in shared memory.
struct Reducers {
  alignas(128) char memory[kReducersPerBlock][kReducerBytes];
  uint32_t written[gemm::kConsumerWarps];  // parts of tiles, by multiplying warp: one may be ahead of another
};

template <>
struct BesideOf<MatmulReduceArgs> {
  using Type = Reducers;
};

template <class T>
struct ReduceBeside {
  static constexpr bool kStores = false, kAwaitStores = true;
  using Beside = Reducers;
  const Work<MatmulReduceArgs>& work;
  const gemm::Problem& problem;
  Reducers& beside;

  JAX_EP_FN gemm::Rows before_tile(const gemm::Tile& tile, const CUtensorMap& a) const { return {a, tile.row}; }
  JAX_EP_FN void after_tile(const gemm::Tile&, int warp) const {
    if (threadIdx.x % Team::lanes != 0) return;
    ptx::proxy_fence();
    ptx::count_one(&beside.written[warp]);
  }
  JAX_EP_FN void after_last(const gemm::Tile&, int, int) const {}
  JAX_EP_FN void run_beside(int warp, int block, int blocks) const {
    if (warp == 0)
      announce(block, blocks);
    else if (block < work.communicating)
      reduce(warp - 1, blocks);
  }

 private:
  JAX_EP_FN int all_teams(int blocks) const { return blocks + work.communicating * kReducersPerBlock; }
  JAX_EP_FN Buffer result() const { return {work.args.result, result_bytes(work.args, work.comm.size)}; }

  // A block of rows is announced when all of its tiles are written.
  JAX_EP_FN void announce(int block, int blocks) const {
    const MatmulReduceArgs& args = work.args;
    const Team team = multiplying_team();
    Op op(work.comm, team, kind_of(args));
    const RowBlocks row_blocks(args.m);
    gemm::Schedule schedule(problem, work.block_n, block, blocks);
    int tiles_seen = 0;
    for (gemm::Tile tile; schedule.next(&tile); ++tiles_seen) {
      wait_written(beside.written, work.block_n, tiles_seen);
      if (tile.row >= args.m || tile.col >= args.n) continue;
      const Range rows = row_blocks.chunk(row_blocks.chunk_of(tile.row));
      const int tiles = ceil_div(rows.end - rows.begin, gemm::kBlockM) * ceil_div(args.n, work.block_n) *
                        (problem.split_k ? gemm::kCluster : 1);
      op.deliver(row_blocks.chunk_of(tile.row), 1, tiles);
    }
    const Buffer results[] = {result()};
    op.finish(results, all_teams(blocks));
  }

  JAX_EP_FN void reduce(int warp, int blocks) const {
    const Team team = sharing_team(warp, kReducersPerBlock, work.communicating, beside.memory[warp], kReducerBytes);
    Op op(work.comm, team, kind_of(work.args));
    op.post(work.args.partial, work.args.result);
    op.wait_posted();
    MatmulReduce<T> sums(op, work.args);
    sums.reduce();
    sums.conclude();
    const Buffer results[] = {result()};
    op.finish(results, all_teams(blocks));
  }
};

template <class In, class Out, int kBlockN, bool kMnB>
JAX_EP_FN void run_overlapped(char* memory, const Operands& operands, const Work<MatmulReduceArgs>& work) {
  using Hooks = ReduceBeside<typename RowOf<Out>::Type>;
  poison_result(work, {work.args.result, result_bytes(work.args, work.comm.size)});
  Reducers& beside = reinterpret_cast<gemm::Shared<kBlockN, Reducers>*>(memory)->beside;
  if (threadIdx.x < gemm::kConsumerWarps) beside.written[threadIdx.x] = 0;  // before all warps meet
  const Hooks hooks{work, operands.problem, beside};
  gemm::multiply_tiles<In, Out, kBlockN, false, kMnB>(memory, operands.a, operands.b, operands.out_map, operands.out,
                                                      operands.problem, hooks, blockIdx.x, gridDim.x);
}

}  // namespace jax_ep
