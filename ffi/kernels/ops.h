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

// By what a GPU's kernel is compiled for: the dtype of rows, nothing, or the tiles of a product.
#define JAX_EP_ROW_OPS(X) JAX_EP_MOE_OPS(X) X(SparseReduceArgs)
#define JAX_EP_BLIND_OPS(X) JAX_EP_RAGGED_OPS(X) X(SparseUnionArgs)

#define JAX_EP_OPS(X) JAX_EP_MOE_OPS(X) JAX_EP_RAGGED_OPS(X) JAX_EP_SPARSE_OPS(X) JAX_EP_MATMUL_OPS(X)
