// The sizes of buffers that Python must know when it traces an op.
#pragma once

#include "device/heap.h"
#include "device/layout.h"
#include "kernels/args.h"

namespace jax_ep {

// The scratch of dispatch and of sparse_union, in int32.
inline int64_t route_scratch(int num_experts) { return route_scratch_ints(num_experts, kMaxRanks); }
inline int64_t bitmap_scratch(int num_rows) { return bitmap_scratch_ints(num_rows); }

// The slots of each source in which tokens of dispatch land, and the bytes of one.
inline int landing_slots(int num_tokens, int top_k, bool wire_float8, bool rows_float8) {
  return early_tokens(num_tokens, top_k, wire_float8, rows_float8);
}
inline int64_t landing_slot(int hidden, int value_bytes, bool wire_float8, bool rows_float8) {
  return landing_slot_bytes(hidden, value_bytes, wire_float8, rows_float8);
}

// The rows from each peer of the landing of sparse_reduce, which every platform chooses, and its bytes.
int sparse_landing_room(int entries, int ranks, bool sharded);
inline int64_t sparse_landing_bytes(int ranks, int slots, int entries, bool sharded, int64_t row_bytes) {
  return landing_bytes(ranks, slots, sparse_landing_room(entries, ranks, sharded), row_bytes);
}

}  // namespace jax_ep
