// Which buffers of an op peers write into, or read: what its kernel posts, in the order in which it does.
#pragma once

#include "comm/layout.h"
#include "kernels/matmul/args.h"
#include "kernels/moe/args.h"
#include "kernels/ragged/args.h"
#include "kernels/sparse/args.h"

namespace jax_ep {

enum class Use {
  landing,  // nobody reads it after the op
  result,
  updated,  // a result that keeps what no peer overwrites
  operand,  // only read
};

// Calls visit(pointer, bytes, use) for every buffer of the mail; the pointer may be changed.
template <class Visit>
void for_each_posted(DispatchArgs& args, int ranks, Visit visit) {
  const int64_t table = int64_t{ranks} * args.num_tokens * args.top_k * 4;
  const int64_t values = int64_t{args.capacity} * args.hidden;
  const bool lands_in_rows = args.early < args.num_tokens;
  visit(args.received, lands_in_rows ? values * (args.rows_float8 ? 1 : size_of(args.dtype)) : 0, Use::result);
  visit(args.rows, args.few ? 0 : table, Use::result);
  visit(args.arrived, args.few ? 0 : table, Use::result);
  visit(args.scales, lands_in_rows && args.rows_float8 ? values / kScaleBlock * 4 : 0, Use::result);
  visit(args.landing, args.landing_bytes, Use::landing);
}

template <class Visit>
void for_each_posted(ScatterArgs& args, int, Visit visit) {
  visit(args.received, int64_t{args.capacity} * args.hidden * size_of(args.dtype), Use::result);
}

template <class Visit>
void for_each_posted(CombineArgs& args, int ranks, Visit visit) {
  visit(args.landing, int64_t{ranks} * args.num_tokens * args.hidden * size_of(args.dtype), Use::landing);
  visit(args.returned, args.returned ? int64_t{args.num_tokens} * args.top_k * 4 : 0, Use::result);
}

template <class Visit>
void for_each_posted(RaggedArgs& args, int, Visit visit) {
  visit(args.result, args.result_rows * args.row_bytes, Use::updated);
}

template <class Visit>
void for_each_posted(SparseUnionArgs& args, int ranks, Visit visit) {
  visit(args.slots, int64_t{ranks} * args.entries * 4, Use::result);
}

template <class Visit>
void for_each_posted(SparseReduceArgs& args, int ranks, Visit visit) {
  const int64_t row = int64_t{args.hidden} * size_of(args.dtype);
  visit(args.values, args.entries * row, Use::operand);
  visit(args.result, args.capacity * row, Use::result);
  visit(args.partials, int64_t{args.entries} * args.hidden * 4, Use::landing);
  visit(args.landing, landing_bytes(ranks, args.slots_kept, args.landing_room, row), Use::landing);
}

template <class Visit>
void for_each_posted(MatmulReduceArgs& args, int, Visit visit) {
  const int64_t bytes = int64_t{args.m} * args.n * size_of(args.dtype);
  visit(args.partial, bytes, Use::landing);
  visit(args.result, args.scatter ? 0 : bytes, Use::result);
}

template <class Visit>
void for_each_posted(GatherMatmulArgs& args, int ranks, Visit visit) {
  visit(args.gathered, int64_t{ranks} * args.m * args.k * size_of(args.operand_dtype), Use::result);
}

}  // namespace jax_ep
