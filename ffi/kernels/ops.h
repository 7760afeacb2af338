// Every op by name. An op is added here, in args.h of its family (what it is called with), in a header of its own (what
// its kernel does), and in kernels.h; bindings, signatures and launches follow from these lists.
#pragma once

#include <cstdint>

namespace jax_ep {

enum class OpKind : int32_t {
  dispatch,
  scatter,
  combine,
  ragged_all_to_all,
  sparse_union,
  sparse_reduce,
  matmul_all_reduce,
  matmul_reduce_scatter,
  all_gather_matmul
};

}  // namespace jax_ep

// By family: X(Args) for the arguments of each op.
#define JAX_EP_MOE_OPS(X) X(DispatchArgs) X(ScatterArgs) X(CombineArgs)
#define JAX_EP_RAGGED_OPS(X) X(RaggedArgs)
#define JAX_EP_SPARSE_OPS(X) X(SparseUnionArgs) X(SparseReduceArgs)
#define JAX_EP_MATMUL_OPS(X) X(MatmulReduceArgs) X(GatherMatmulArgs)

// Those that need no group of ranks. Hopper GPUs alone have their kernels.
#define JAX_EP_ALONE_OPS(X) X(gemm::Product)

#define JAX_EP_ROW_OPS(X) JAX_EP_MOE_OPS(X) JAX_EP_RAGGED_OPS(X) JAX_EP_SPARSE_OPS(X)
#define JAX_EP_OPS(X) JAX_EP_ROW_OPS(X) JAX_EP_MATMUL_OPS(X)

// The kernels of the ops on rows, most of which have one; choose_kernel in kernels/kernels.h knows the others. Those
// that look at values are compiled for each dtype, and those that are blind once: they move bytes.
#define JAX_EP_VALUE_KERNELS(X) \
  X(EncodedDispatchArgs) X(Float8DispatchArgs) X(CombineArgs) X(LongCombineArgs) X(SparseReduceArgs)
#define JAX_EP_BLIND_KERNELS(X) X(PlainDispatchArgs) X(ScatterArgs) X(RaggedArgs) X(SparseUnionArgs)
