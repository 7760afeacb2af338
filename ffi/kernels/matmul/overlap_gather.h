// One kernel for a gather and its product. All blocks multiply; a warp of each looks out for the rows of its tiles, and
// two more spread this rank's rows. They take them in turns, so peers get all rows however few of the blocks run.
#pragma once

#include "kernels/matmul/gather.h"
#include "kernels/matmul/overlap.h"

namespace jax_ep {

static_assert(kBlockRows == gemm::kBlockM, "a flag stands for whole tiles");

constexpr int kSpreadersPerBlock = gemm::kWarpsBeside - 1;

// Of the warps beside the product, in shared memory.
struct Lookout {
  uint32_t here;  // tiles that had to wait for their rows, and need not any more
};

template <>
struct BesideOf<GatherMatmulArgs> {
  using Type = Lookout;
};

JAX_EP_FN Buffer result_of(const Work<GatherMatmulArgs>& work) {
  const GatherMatmulArgs& args = work.args;
  return {args.result, int64_t{args.m} * work.comm.size * args.n * size_of(args.dtype)};
}

// A tile's rows are read from where they are: this rank's own from its operand, the others from what is gathered.
struct GatherBeside {
  static constexpr bool kStores = false, kAwaitStores = false;
  using Beside = Lookout;
  const Work<GatherMatmulArgs>& work;
  const gemm::Problem& problem;
  Lookout& beside;
  mutable uint32_t awaited = 0;  // of the producer

  JAX_EP_FN gemm::Rows before_tile(const gemm::Tile& tile, const CUtensorMap& gathered) const {
    if (must_wait(tile)) ptx::wait_count(&beside.here, ++awaited);
    if (is_own(tile)) return {work.own, tile.row - work.comm.rank * work.args.m};
    return {gathered, tile.row};
  }
  JAX_EP_FN void after_tile(const gemm::Tile&, int) const {}
  JAX_EP_FN void after_last(const gemm::Tile&, int, int) const {}
  JAX_EP_FN void run_beside(int warp, int block, int blocks) const {
    if (warp == 0)
      look_out(block, blocks);
    else if (block < work.communicating)
      spread(warp - 1, blocks);
  }
  // Of every block come the lookout and, for all that multiply, one more.
  JAX_EP_FN void finish(Op& op, int blocks) const {
    const GatherMatmulArgs& args = work.args;
    const int64_t gathered = int64_t{args.m} * work.comm.size * args.k * size_of(args.operand_dtype);
    const Buffer results[] = {result_of(work), {args.gathered, gathered}};
    op.finish(results, 2 * blocks + work.communicating * kSpreadersPerBlock);
  }

 private:
  JAX_EP_FN Range rows_of(const gemm::Tile& tile) const {
    return {tile.row, smaller(tile.row + gemm::kBlockM, work.args.m * work.comm.size)};
  }
  JAX_EP_FN bool is_own(const gemm::Tile& tile) const {
    const int first = work.comm.rank * work.args.m;
    return first <= rows_of(tile).begin && rows_of(tile).end <= first + work.args.m;
  }
  // Debug: nothing may be written before the result is poisoned, which every flag stands for.
  JAX_EP_FN bool must_wait(const gemm::Tile& tile) const { return !is_own(tile) || work.comm.poison; }

  JAX_EP_FN void look_out(int block, int blocks) const {
    const Team team = multiplying_team();
    Op op(work.comm, team, kind_of(work.args));
    gemm::Schedule schedule(problem, work.block_n, block, blocks);
    for (gemm::Tile tile; schedule.next(&tile);) {
      if (!must_wait(tile)) continue;
      wait_rows(op, work.args, rows_of(tile));
      ptx::proxy_fence();
      if (team.lane == 0) ptx::count_one(&beside.here);
    }
    finish(op, blocks);
  }

  JAX_EP_FN void spread(int warp, int blocks) const {
    const Team team = sharing_team(warp, kSpreadersPerBlock, work.communicating);
    Op op(work.comm, team, kind_of(work.args));
    op.post(work.args.gathered);
    spread_rows(op, work.args);
    finish(op, blocks);
  }
};

template <class In, class Out, int kBlockN, bool kMnB>
JAX_EP_FN void run_overlapped(char* memory, const Operands& operands, const Work<GatherMatmulArgs>& work) {
  poison_result(work, result_of(work));
  Lookout& beside = reinterpret_cast<gemm::Shared<kBlockN, Lookout>*>(memory)->beside;
  if (threadIdx.x == 0) beside.here = 0;  // before all warps meet
  const GatherBeside hooks{work, operands.problem, beside};
  gemm::multiply_tiles<In, Out, kBlockN, false, kMnB>(memory, operands.a, operands.b, operands.out_map, operands.out,
                                                      operands.problem, hooks, blockIdx.x, gridDim.x);
  if (threadIdx.x >= gemm::kConsumers) return;
  ptx::sync_some(1, gemm::kConsumers);  // all that multiply have written their tiles
  if (threadIdx.x >= Team::lanes) return;
  const Team team = multiplying_team();
  Op op(work.comm, team, kind_of(work.args));
  hooks.finish(op, gridDim.x);
}

}  // namespace jax_ep
