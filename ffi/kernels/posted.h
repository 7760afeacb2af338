// Which buffers of an op peers write into, or read: what its kernel posts, in the order in which it does.
#pragma once

#include "kernels/args.h"
#include "kernels/sparse_args.h"

namespace jax_ep {

enum class Use {
  landing,  // nobody reads it after the op
  result,
  updated,  // a result that keeps what no peer overwrites
  operand,  // only read
};

constexpr int64_t value_bytes(DType dtype) { return dtype == DType::float32 ? 4 : 2; }

// Calls visit(pointer, bytes, use) for every buffer of the mail; the pointer may be changed.
template <class Visit>
void for_each_posted(DispatchArgs& args, int ranks, Visit visit) {
  const int64_t table = int64_t{ranks} * args.num_tokens * args.top_k * 4;
  if (args.wire_float8 && !args.rows_float8)
    visit(args.landing, args.landing_bytes, Use::landing);
  else
    visit(args.received, int64_t{args.capacity} * args.hidden * (args.rows_float8 ? 1 : value_bytes(args.dtype)),
          Use::result);
  visit(args.rows, table, Use::result);
  visit(args.arrived, table, Use::result);
  if (args.rows_float8) visit(args.scales, int64_t{args.capacity} * args.hidden / 128 * 4, Use::result);
}

template <class Visit>
void for_each_posted(ScatterArgs& args, int, Visit visit) {
  visit(args.received, int64_t{args.capacity} * args.hidden * value_bytes(args.dtype), Use::result);
}

template <class Visit>
void for_each_posted(CombineArgs& args, int ranks, Visit visit) {
  visit(args.landing, int64_t{ranks} * args.num_tokens * args.hidden * value_bytes(args.dtype), Use::landing);
  visit(args.returned, args.returned ? int64_t{args.num_tokens} * args.top_k * 4 : 0, Use::result);
}

template <class Visit>
void for_each_posted(RaggedArgs& args, int, Visit visit) {
  visit(args.result, args.result_rows * args.row_bytes, Use::updated);
}

template <class Visit>
void for_each_posted(SparseUnionArgs& args, int ranks, Visit visit) {
  const int64_t table = int64_t{ranks} * args.entries * 4;
  visit(args.slots, table, Use::result);
  visit(args.orders, table, Use::result);
}

template <class Visit>
void for_each_posted(SparseReduceArgs& args, int, Visit visit) {
  const int64_t row = int64_t{args.hidden} * value_bytes(args.dtype);
  visit(args.values, args.entries * row, Use::operand);
  visit(args.result, args.capacity * row, Use::result);
  visit(args.partials, int64_t{args.entries} * args.hidden * 4, Use::landing);
}

}  // namespace jax_ep
