// One kernel for a product and its collective: the first blocks of the grid communicate, the others multiply. Blocks
// start in order, so the few that peers wait for have a processor whatever else runs.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "device/platform.h"
#include "device/target/cuda_bulk.h"
#include "gemm/kernel.h"
#include "kernels/gather_matmul.h"
#include "kernels/matmul_reduce.h"

namespace jax_ep {

static_assert(kBlockRows == gemm::kBlockM, "a flag stands for whole tiles");

// What the kernel is told of its op.
template <class Args>
struct Work {
  Comm comm;
  Args args;
  int communicating;  // blocks
  int block_n;        // columns of a tile
};

constexpr int kTeamsPerBlock = gemm::kThreads / 32;
// Two batches to write and seven to read, or a ring of three pieces of a row.
constexpr int kTeamBytes = 128 + 9 * 2048;
static_assert(kTeamsPerBlock * kTeamBytes <= sizeof(gemm::Shared<128>), "a block has the memory of a multiplying one");
static_assert(kTeamsPerBlock * kTeamBytes <= sizeof(gemm::Shared<256>), "a block has the memory of a multiplying one");

// Every warp of the communicating blocks pushes, and takes in what arrives.
JAX_EP_FN Team communicating_team(char* memory, int blocks) {
  const int block = blockIdx.x, warp = threadIdx.x / Team::lanes;
  const Place all{block * kTeamsPerBlock + warp, blocks * kTeamsPerBlock};
  return {all.index,
          all.count,
          all,
          all,
          {block, blocks},
          {warp, kTeamsPerBlock},
          static_cast<int>(threadIdx.x % Team::lanes),
          memory + warp * kTeamBytes,
          kTeamBytes};
}

// A warp of a multiplying block, which has only news for the others.
JAX_EP_FN Team multiplying_team() {
  constexpr Place kNone{-1, 1};
  return {-1, 1, kNone, kNone, {-1, 1}, {0, 1}, static_cast<int>(threadIdx.x % Team::lanes), nullptr, 0};
}

template <class Args>
JAX_EP_FN int all_teams(const Work<Args>& work) {
  return work.communicating * kTeamsPerBlock + static_cast<int>(gridDim.x) - work.communicating;
}

// Announces a block of rows of the product when all of its tiles are written.
struct AnnounceTiles {
  static constexpr bool kAwaitStores = true;
  const Work<MatmulReduceArgs>& work;

  JAX_EP_FN void before_tile(const gemm::Tile&) const {}
  JAX_EP_FN void after_tile(const gemm::Tile& tile, int) const {
    const MatmulReduceArgs& args = work.args;
    if (tile.row >= args.m || tile.col >= args.n) return;
    bulk::proxy_fence();
    const RowBlocks blocks(args.m);
    const Range rows = blocks.chunk(blocks.chunk_of(tile.row));
    const int tiles = gemm::ceil_div(rows.end - rows.begin, gemm::kBlockM) * gemm::ceil_div(args.n, work.block_n);
    const Team team = multiplying_team();
    Op(work.comm, team, kind_of(args)).deliver(blocks.chunk_of(tile.row), 1, tiles * gemm::kConsumerWarps);
  }
};

// Waits for the rows of a tile.
struct AwaitRows {
  static constexpr bool kAwaitStores = false;
  const Work<GatherMatmulArgs>& work;

  JAX_EP_FN void before_tile(const gemm::Tile& tile) const {
    const GatherMatmulArgs& args = work.args;
    const Team team = multiplying_team();
    Op op(work.comm, team, kind_of(args));
    wait_rows(op, args, {tile.row, smaller(tile.row + gemm::kBlockM, args.m * work.comm.size)});
    bulk::proxy_fence();
  }
  JAX_EP_FN void after_tile(const gemm::Tile&, int) const {}
};

template <class Args>
struct HooksOf;
template <>
struct HooksOf<MatmulReduceArgs> {
  using Type = AnnounceTiles;
};
template <>
struct HooksOf<GatherMatmulArgs> {
  using Type = AwaitRows;
};

JAX_EP_FN Buffer result_of(const Work<MatmulReduceArgs>& work) {
  return {work.args.result, result_bytes(work.args, work.comm.size)};
}
JAX_EP_FN Buffer result_of(const Work<GatherMatmulArgs>& work) {
  const GatherMatmulArgs& args = work.args;
  return {args.result, int64_t{args.m} * work.comm.size * args.n * size_of(args.dtype)};
}

template <class T>
JAX_EP_FN void communicate(Op& op, const MatmulReduceArgs& args) {
  op.post(args.partial, args.result);
  op.wait_posted();
  MatmulReduce<T> sums(op, args);
  sums.reduce();
  sums.conclude();
}
template <class T>
JAX_EP_FN void communicate(Op& op, const GatherMatmulArgs& args) {
  op.post(args.gathered);
  op.wait_posted();
  push_rows(op, args);
}

// The row format that goes by another name here.
template <class T>
struct RowOf {
  using Type = T;
};
template <>
struct RowOf<__nv_bfloat16> {
  using Type = BFloat16;
};
template <>
struct RowOf<__half> {
  using Type = Float16;
};

template <class In, class Out, int kBlockN, bool kMnB, class Args>
__global__ void __cluster_dims__(gemm::kCluster, 1, 1) __launch_bounds__(gemm::kThreads, 1)
    overlapped_kernel(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
                      const __grid_constant__ CUtensorMap out_map, void* out,
                      const __grid_constant__ gemm::Problem problem, const __grid_constant__ Work<Args> work) {
  extern __shared__ __align__(1024) char memory[];
  const Buffer results[] = {result_of(work)};
  const int block = static_cast<int>(blockIdx.x) - work.communicating;
  if (block < 0) {
    const Team team = communicating_team(memory, work.communicating);
    Op op(work.comm, team, kind_of(work.args));
    op.poison(results);
    communicate<typename RowOf<Out>::Type>(op, work.args);
    op.finish(results, all_teams(work));
  } else {
    const typename HooksOf<Args>::Type hooks{work};
    gemm::multiply_tiles<In, Out, kBlockN, false, kMnB>(memory, a, b, out_map, out, problem, hooks, block,
                                                        gridDim.x - work.communicating);
    if (threadIdx.x >= Team::lanes) return;
    const Team team = multiplying_team();
    Op(work.comm, team, kind_of(work.args)).finish(results, all_teams(work));
  }
}

}  // namespace jax_ep
