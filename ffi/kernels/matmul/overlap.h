// One kernel for a product and its collective: all blocks multiply, and the producer's warpgroup has three warps beside
// that the product does not need. What those do is in overlap_exchange.h, overlap_gather.h and overlap_reduce.h.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "comm/op.h"
#include "comm/platform.h"
#include "comm/target/ptx/block.h"
#include "comm/target/ptx/bulk.h"
#include "gemm/kernel.h"
#include "kernels/matmul/args.h"
#include "kernels/matmul/product.h"

namespace jax_ep {

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

// A warp of those that share some work: so many a block, in the first blocks.
JAX_EP_FN Team sharing_team(int warp, int warps, int blocks, char* memory = nullptr, int bytes = 0) {
  const int block = blockIdx.x, lane = threadIdx.x % Team::lanes;
  const Place all{warp * blocks + block, blocks * warps};
  return {all.index, all.count, all, all, {block, blocks}, {warp, warps}, lane, memory, bytes};
}

// Debug: the blocks that communicate fill the result before any peer may write to it.
template <class Args>
JAX_EP_FN void poison_result(const Work<Args>& work, Buffer result) {
  if (!work.comm.poison || static_cast<int>(blockIdx.x) >= work.communicating) return;
  const Team team = sharing_team(threadIdx.x / Team::lanes, kTeamsPerBlock, work.communicating);
  const Buffer results[] = {result};
  Op(work.comm, team, kind_of(work.args)).poison(results);
}

// A warp of a multiplying block, which has only news for the others.
JAX_EP_FN Team multiplying_team() {
  constexpr Place kNone{-1, 1};
  return {-1, 1, kNone, kNone, {-1, 1}, {0, 1}, static_cast<int>(threadIdx.x % Team::lanes), nullptr, 0};
}

// Until a tile of this block, by its number, is written; a counter for each multiplying warp.
JAX_EP_FN void wait_written(const uint32_t (&written)[gemm::kConsumerWarps], int block_n, int tile) {
  const gemm::Storing by = gemm::storing(block_n, tile);
  ptx::wait_counts(written + by.first, by.warps, by.tiles);
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

// For the arguments of each op: see there.
template <class In, class Out, int kBlockN, bool kMnB, class Args>
JAX_EP_FN void run_overlapped(char* memory, const Operands& operands, const Work<Args>& work);

template <class In, class Out, int kBlockN, bool kMnB, class Args>
__global__ void __cluster_dims__(gemm::kCluster, 1, 1) __launch_bounds__(gemm::kThreads, 1)
    overlapped_kernel(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
                      const __grid_constant__ CUtensorMap out_map, void* out,
                      const __grid_constant__ gemm::Problem problem, const __grid_constant__ Work<Args> work) {
  extern __shared__ __align__(1024) char memory[];
  run_overlapped<In, Out, kBlockN, kMnB>(memory, {a, b, out_map, out, problem}, work);
}

}  // namespace jax_ep
