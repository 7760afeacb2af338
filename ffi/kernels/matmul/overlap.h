// One kernel for a product and its collective: all CTAs multiply, and the producer's warpgroup has three aux warps,
// which the product does not need. What those do is in overlap_exchange.h, overlap_gather.h and overlap_reduce.h.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "comm/op.h"
#include "comm/platform.h"
#include "comm/target/ptx/cta.h"
#include "gemm/kernel.h"
#include "kernels/matmul/args.h"
#include "kernels/op_buffers.h"
#include "kernels/role.h"

namespace jax_ep {

// What the kernel is told of its op.
template <class Args>
struct Work {
  Comm comm;
  Args args;
  int communicating;        // CTAs
  int first_communicating;  // the first of them
  int block_n;              // columns of a tile
  CUtensorMap own;          // of a gather: this rank's rows where they are
};

// The roles that products have in common. Those that multiply meet at barriers 1 and 2.
template <class Args>
JAX_EP_FN Role all_that_communicate(const Work<Args>& work) {
  return {kWarpsPerCta, work.first_communicating, work.communicating, /*barrier=*/0};
}
template <class Args>
JAX_EP_FN Role communicators(const Work<Args>& work) {
  return {gemm::kAuxWarps - 1, work.first_communicating, work.communicating, /*barrier=*/4};
}

// The results of the op: MatmulExchangeArgs have no spec of their own.
JAX_EP_FN Results<MatmulReduceArgs> results_of(const Comm& comm, const MatmulReduceArgs& args) {
  return {args, comm.size};
}
JAX_EP_FN Results<GatherMatmulArgs> results_of(const Comm& comm, const GatherMatmulArgs& args) {
  return {args, comm.size};
}

// Debug: the CTAs that communicate fill the results before any peer may write to them. All their warps call, before
// they multiply. They wait for each other, so all must find an SM.
template <class Args>
JAX_EP_FN void poison_results(const Work<Args>& work) {
  const Role role = all_that_communicate(work);
  if (!work.comm.poison || !role.has(blockIdx.x)) return;
  const Coop coop = role.coop(threadIdx.x / Coop::lanes);
  Op(work.comm, coop, kind_of(work.args)).poison(results_of(work.comm, work.args));
}

// Waits until a tile of this CTA, by its number, is written. `written` has a counter for each multiplying warp.
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

// What the aux warps of a CTA keep in its shared memory: said by the header of each op.
template <class Args>
struct AuxOf;

// Each op has one for its arguments, in the header of its overlap.
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
