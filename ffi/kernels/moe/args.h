// What the ops of a dispatch are called with: plain pointers into XLA's buffers of this rank, and the shapes.
#pragma once

#include <cstdint>

#include "comm/dtype.h"
#include "comm/heap.h"

namespace jax_ep {

// Whether ranks tell each other all that their tokens chose.
constexpr bool are_few(int num_tokens, int top_k) {
  return num_tokens <= kFewTokens && num_tokens * top_k <= kFewAssignments;
}

// The tokens, the first, that set off before their places are known: few of them, and all that are to be decoded, which
// lands in slots anyway.
constexpr int early_tokens(int num_tokens, int top_k, bool wire_float8, bool rows_float8) {
  const bool all = are_few(num_tokens, top_k) || (wire_float8 && !rows_float8);
  return all || num_tokens < kEarlyTokens ? num_tokens : kEarlyTokens;
}

// Shapes as in jax_ep.dispatch: T tokens, top-K, H hidden, E experts, C capacity, R ranks, L = E / R.
struct DispatchArgs {
  DType dtype;
  int num_tokens, top_k, hidden, num_experts, capacity, alignment;
  bool drop, wire_float8;
  bool rows_float8;           // they stay as they travelled
  const char* tokens;         // [T, H]
  const int32_t* expert_ids;  // [T, K]
  const float* weights;       // [T, K]
  char* received;             // [C, H]
  float* scales;              // [C, H / 128], of rows in float8
  int32_t* group_sizes;       // [L]
  int32_t* targets;           // [T, K]
  int32_t* rows;              // [R, T, K]
  float* arrived;             // [R, T, K]
  int32_t* counts;            // [R, L]
  int32_t* dropped;           // [1]
  int32_t* invalid;           // [1]
  int32_t* scratch;
  bool few;       // tokens
  int early;      // tokens, the first: they land in slots by source and token, and go to their rows from there
  char* landing;  // [R, early] slots
  int64_t landing_bytes;
};

// Of the routing that scatter and combine are handed: which leaf is out of bounds, as the `peer` of a report.
enum class RoutingLeaf : int32_t { targets, rows, counts };

struct ScatterArgs {
  DType dtype;
  int num_tokens, top_k, hidden, local_experts, capacity, alignment;
  const char* tokens;      // [T, H]
  const int32_t* targets;  // [T, K]
  const int32_t* rows;     // [R, T, K]
  const int32_t* counts;   // [R, L]
  char* received;          // [C, H]
};

struct CombineArgs {
  DType dtype;
  int num_tokens, top_k, hidden, capacity;
  const char* outputs;     // [C, H]
  const float* weights;    // [R, T, K], or null for 1
  const float* scalars;    // [R, T, K] to return to their token's rank, or null
  const int32_t* targets;  // [T, K]
  const int32_t* rows;     // [R, T, K]
  char* combined;          // [T, H]
  float* returned;         // [T, K], or null
  char* landing;           // [R, T, H] partial sums
};

// The same for a kernel of its own, which sums long batches.
struct LongCombineArgs : CombineArgs {};

constexpr OpKind kind_of(const DispatchArgs&) { return OpKind::dispatch; }
constexpr OpKind kind_of(const ScatterArgs&) { return OpKind::scatter; }
constexpr OpKind kind_of(const CombineArgs&) { return OpKind::combine; }

}  // namespace jax_ep
