// Every op by name. Bindings, signatures and launches follow from these lists (docs/adding-an-op.md).
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

// The arguments of the ops that run on the ranks of a group: X(Args). grouped_matmul needs no group, and is in no list.
#define JAX_EP_ROW_OPS(X) \
  X(DispatchArgs) X(ScatterArgs) X(CombineArgs) X(RaggedArgs) X(SparseUnionArgs) X(SparseReduceArgs)
#define JAX_EP_COLLECTIVE_MATMUL_OPS(X) X(MatmulReduceArgs) X(AllGatherMatmulArgs)

// The kernels of the ops on rows. kernel_of() chooses one for a call. Kernels that read values are compiled for each
// dtype. Byte-wise kernels only move rows, and are compiled once.
#define JAX_EP_VALUE_KERNELS(X) \
  X(Float8DispatchArgs) X(Float8RowsDispatchArgs) X(CombineArgs) X(GroupedCombineArgs) X(SparseReduceArgs)
#define JAX_EP_BYTE_KERNELS(X) \
  X(FewDispatchArgs)           \
  X(GroupedDispatchArgs) X(PlainDispatchArgs) X(ScatterArgs) X(GroupedScatterArgs) X(RaggedArgs) X(SparseUnionArgs)
