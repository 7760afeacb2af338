// The sizes of buffers that Python must know when it traces an op.
#pragma once

#include "comm/heap.h"
#include "comm/layout.h"

namespace jax_ep {

// The scratch of dispatch and of sparse_union, in int32.
inline int64_t route_scratch(int num_experts) { return route_scratch_ints(num_experts, kMaxRanks); }
inline int64_t bitmap_scratch(int num_rows) { return bitmap_scratch_ints(num_rows); }

// The rows from each peer of the landing of sparse_reduce, which every platform chooses, and its bytes.
int sparse_landing_room(int entries, int ranks, bool sharded);
inline int64_t sparse_landing_bytes(int ranks, int slots, int entries, bool sharded, int64_t row_bytes) {
  return landing_bytes(ranks, slots, sparse_landing_room(entries, ranks, sharded), row_bytes);
}

}  // namespace jax_ep
