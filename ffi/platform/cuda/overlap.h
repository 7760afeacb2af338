// One kernel for a product and its collective. Here that of a gather: the first blocks of the grid communicate, the
// others multiply, and in the end all do. Blocks start in order, so the few that peers wait for have a processor
// whatever else runs.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "device/platform.h"
#include "device/target/cuda_bulk.h"
#include "gemm/kernel.h"
#include "kernels/gather_matmul.h"

namespace jax_ep {

static_assert(kBlockRows == gemm::kBlockM, "a flag stands for whole tiles");

// What the kernel is told of its op.
template <class Args>
struct Work {
  Comm comm;
  Args args;
  int communicating;  // blocks
  int block_n;        // columns of a tile
  CUtensorMap own;    // of a gather: this rank's rows where they are
};

constexpr int kTeamsPerBlock = gemm::kThreads / 32;
// Two batches to write and seven to read, or a ring of three pieces of a row.
constexpr int kTeamBytes = 128 + 9 * 2048;
constexpr int kBlockBytes = kTeamsPerBlock * kTeamBytes;
static_assert(kBlockBytes <= sizeof(gemm::Shared<128>), "a block has the memory of a multiplying one");
static_assert(kBlockBytes <= sizeof(gemm::Shared<256>), "a block has the memory of a multiplying one");

// A warp of the communicating blocks: the first `pushers` of each push, and share the block's memory; the others fill.
JAX_EP_FN Team communicating_team(char* memory, int blocks, int pushers = kTeamsPerBlock) {
  const int block = blockIdx.x, warp = threadIdx.x / Team::lanes, bytes = kBlockBytes / pushers / 128 * 128;
  const bool pushes = warp < pushers;
  const Place all{block * kTeamsPerBlock + warp, blocks * kTeamsPerBlock};
  return {all.index,
          all.count,
          pusher_place(block, blocks, warp, pushers),
          filler_place(block, blocks, warp, kTeamsPerBlock, pushers),
          {block, blocks},
          {warp, kTeamsPerBlock},
          static_cast<int>(threadIdx.x % Team::lanes),
          pushes ? memory + warp * bytes : nullptr,
          pushes ? bytes : 0};
}

// A warp of a multiplying block, which has only news for the others.
JAX_EP_FN Team multiplying_team() {
  constexpr Place kNone{-1, 1};
  return {-1, 1, kNone, kNone, {-1, 1}, {0, 1}, static_cast<int>(threadIdx.x % Team::lanes), nullptr, 0};
}

constexpr int kPushersPerBlock = 6;  // the others copy this rank's rows to their place here

// Waits for the rows of a tile, unless all of them are this rank's own.
struct AwaitRows {
  static constexpr bool kAwaitStores = false;
  using Beside = gemm::Nothing;
  const Work<GatherMatmulArgs>& work;

  JAX_EP_FN gemm::Rows before_tile(const gemm::Tile& tile, const CUtensorMap& gathered) const {
    const GatherMatmulArgs& args = work.args;
    const int first = work.comm.rank * args.m, end = smaller(tile.row + gemm::kBlockM, args.m * work.comm.size);
    if (first <= tile.row && end <= first + args.m && !work.comm.poison) return {work.own, tile.row - first};
    const Team team = multiplying_team();
    Op op(work.comm, team, kind_of(args));
    wait_rows(op, args, {tile.row, end});
    bulk::proxy_fence();
    return {gathered, tile.row};
  }
  JAX_EP_FN void after_tile(const gemm::Tile&, int) const {}
};

JAX_EP_FN Buffer result_of(const Work<GatherMatmulArgs>& work) {
  const GatherMatmulArgs& args = work.args;
  return {args.result, int64_t{args.m} * work.comm.size * args.n * size_of(args.dtype)};
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

// All arguments of a kernel but its op's.
struct Operands {
  const CUtensorMap &a, &b, &out_map;
  void* out;
  const gemm::Problem& problem;
};

// What warps beside the multiplying ones of a block keep in its shared memory.
template <class Args>
struct BesideOf {
  using Type = gemm::Nothing;
};

// The first blocks push rows before they multiply; they come last among those that do.
template <class In, class Out, int kBlockN, bool kMnB>
JAX_EP_FN void run_overlapped(char* memory, const Operands& operands, const Work<GatherMatmulArgs>& work) {
  const Buffer results[] = {result_of(work)};
  const int blocks = gridDim.x;
  int block = static_cast<int>(blockIdx.x) - work.communicating;
  if (block < 0) {
    const Team team = communicating_team(memory, work.communicating, kPushersPerBlock);
    Op op(work.comm, team, kind_of(work.args));
    op.poison(results);
    op.post(work.args.gathered);
    op.wait_posted();
    push_rows(op, work.args);
    keep_rows(op, work.args);
    block += blocks;
  }
  gemm::multiply_tiles<In, Out, kBlockN, false, kMnB>(memory, operands.a, operands.b, operands.out_map, operands.out,
                                                      operands.problem, AwaitRows{work}, block, blocks);
  if (threadIdx.x >= Team::lanes) return;
  const Team team = multiplying_team();
  Op(work.comm, team, kind_of(work.args)).finish(results, blocks);
}

template <class In, class Out, int kBlockN, bool kMnB, class Args>
__global__ void __cluster_dims__(gemm::kCluster, 1, 1) __launch_bounds__(gemm::kThreads, 1)
    overlapped_kernel(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
                      const __grid_constant__ CUtensorMap out_map, void* out,
                      const __grid_constant__ gemm::Problem problem, const __grid_constant__ Work<Args> work) {
  extern __shared__ __align__(1024) char memory[];
  run_overlapped<In, Out, kBlockN, kMnB>(memory, {a, b, out_map, out, problem}, work);
}

}  // namespace jax_ep
