// What the two ops of sparse_all_reduce are called with. Shapes: R ranks, N entries a rank, D values a row, C capacity.
//
// The union of all ranks' row ids, sorted, numbers the slots 0 .. U - 1. An entry of no row has the slot U.
#pragma once

#include <cstdint>

#include "comm/dtype.h"
#include "comm/heap.h"

namespace jax_ep {

constexpr int kMissing = 2;  // counters of what is missing in a result

struct SparseUnionArgs {
  int entries, num_rows, capacity;
  bool sharded;            // a rank's result holds the ids of its own range of the table only
  const int32_t* ids;      // [N] in any order; num_rows where there is none
  const int32_t* missing;  // [2] entries ignored and ids dropped before, for the user
  int32_t* indices;        // [C] of this rank's result
  int32_t* slots;          // [R, N] of the entries of all ranks
  int32_t* bounds;         // [R + 1] ids below the range of each rank, and all ids
  int32_t* all_missing;    // [2] over all ranks
  int32_t* scratch;
};

// The entries of one rank that name one row: the first of them, and how many they are.
struct Run {
  int32_t first, entries;
};
constexpr int32_t kNoEntry = INT32_MAX;

struct SparseReduceArgs {
  DType dtype;
  int entries, hidden, capacity;
  int slots_kept;    // most slots that a result can use: the length of the table of runs
  int landing_room;  // rows that each peer may leave in the landing; 0: owners fetch all
  bool sharded, drop;
  bool by_count;          // rows are divided by their number of entries ...
  float scale;            // ... or else multiplied by this
  const char* values;     // [N, D]
  const int32_t* slots;   // [R, N]
  const int32_t* bounds;  // [R + 1]
  char* result;           // [C, D]
  Run* runs;              // [R, slots_kept]
  int32_t* heads;         // [slots_kept] where the chain of this rank's entries of a row begins
  int32_t* next;          // [N] in that chain
  int32_t* members;       // [N] the entries of rows of which this rank has several, side by side and in order
  int32_t* begins;        // [slots_kept] where those of a row begin
  int32_t* listed;        // [1] how many there are
  int32_t* long_slots;    // [N] the slots of those rows that have many entries
  int32_t* long_lists;    // [1] how many such rows there are
  int32_t* sent;          // [R] parts that were sent to each owner
  char* landing;          // of parts from peers
  float* partials;        // [N, D] sums over entries of this rank, at the first of them
};

constexpr OpKind kind_of(const SparseUnionArgs&) { return OpKind::sparse_union; }
constexpr OpKind kind_of(const SparseReduceArgs&) { return OpKind::sparse_reduce; }

}  // namespace jax_ep
