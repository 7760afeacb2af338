// One kernel for a product and its collective. Here that of a gather: the first blocks of the grid communicate, the
// others multiply. Blocks start in order, so the few that peers wait for have a processor whatever else runs.
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

// Waits for the rows of a tile.
struct AwaitRows {
  static constexpr bool kAwaitStores = false;
  using Beside = gemm::Nothing;
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

// The first blocks push rows, the others multiply.
template <class In, class Out, int kBlockN, bool kMnB>
JAX_EP_FN void run_overlapped(char* memory, const Operands& operands, const Work<GatherMatmulArgs>& work) {
  const Buffer results[] = {result_of(work)};
  const int block = static_cast<int>(blockIdx.x) - work.communicating, multiplying = gridDim.x - work.communicating;
  const int teams = work.communicating * kTeamsPerBlock + multiplying;
  if (block < 0) {
    const Team team = communicating_team(memory, work.communicating);
    Op op(work.comm, team, kind_of(work.args));
    op.poison(results);
    op.post(work.args.gathered);
    op.wait_posted();
    push_rows(op, work.args);
    op.finish(results, teams);
  } else {
    const AwaitRows hooks{work};
    gemm::multiply_tiles<In, Out, kBlockN, false, kMnB>(memory, operands.a, operands.b, operands.out_map, operands.out,
                                                        operands.problem, hooks, block, multiplying);
    if (threadIdx.x >= Team::lanes) return;
    const Team team = multiplying_team();
    Op(work.comm, team, kind_of(work.args)).finish(results, teams);
  }
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
