// How a dispatch numbers rows, cuts tokens up and lays segments out; and the sizes of its scratch. Kernels and the host
// use the same arithmetic.
#pragma once

#include <cstdint>

#include "comm/heap.h"
#include "comm/integers.h"
#include "comm/platform.h"

namespace jax_ep {

constexpr int kMaxExperts = kMailCounts;
constexpr int kFewAssignments = kMailCounts;
// How tokens are cut up. Tuned with `kernels_bench 2`, and for few tokens with `kernels_bench 2 few`.
constexpr int kFewTokens = 512;     // at most; few tokens are announced one by one
constexpr int kChunkTokens = 512;   // the least tokens that are announced together if tokens are not few
constexpr int kMaxChunks = 16;      // of a source
constexpr int kEagerTokens = 1024;  // travel before their rows are known
static_assert(kFewTokens <= kMaxFlags && kMaxChunks <= kMaxFlags);

// Assignments per routing CTA. Tuned with `kernels_bench 2`.
constexpr int kRoutingAssignments = Coop::lanes == 1 ? 256 : 2048;

// A token's row at the rank that owns the expert, as one number; -1 stands for none.
struct Target {
  int owner, row;
};
JAX_EP_FN int pack_target(Target target, int capacity) { return target.owner * capacity + target.row; }
JAX_EP_FN Target unpack_target(int packed, int capacity, const Divider& by_capacity) {
  const int owner = by_capacity.quotient(packed);
  return {owner, packed - owner * capacity};
}

// Pops values[0] and shifts the rest. Arrays in registers cannot be indexed by the variable of a rolled loop.
template <class Value, int kCount>
JAX_EP_FN Value pop_front(Value (&values)[kCount]) {
  const Value first = values[0];
  for (int i = 0; i < kCount - 1; ++i) values[i] = values[i + 1];
  return first;
}

// One local expert's rows: [start, start + rows) hold tokens, up to start + padded are zero.
struct Segment {
  int start, rows, padded;
};

// Lays out the local experts in order, one lane for each. All lanes call visit(expert, segment) together; a lane behind
// the last expert has an empty segment. Returns the end of the last segment. `rows_of(expert)` counts the expert's
// assignments.
template <class RowsOf, class Visit>
JAX_EP_FN int for_each_segment(const Coop& coop, int local_experts, int alignment, RowsOf rows_of, Visit visit) {
  constexpr int kAhead = Coop::lanes == 1 ? 1 : 4;
  int start = 0;
  for (int first = 0; first < local_experts; first += kAhead * Coop::lanes) {
    int rows[kAhead];  // all loads are in flight before the first value is used
    for (int i = 0; i < kAhead; ++i) {
      const int expert = first + i * Coop::lanes + coop.lane;
      rows[i] = expert < local_experts ? rows_of(expert) : 0;
    }
    JAX_EP_ROLLED
    for (int i = 0; i < kAhead && first + i * Coop::lanes < local_experts; ++i) {
      const int mine = pop_front(rows), padded = align_up(mine, alignment);
      int total = 0;
      const int before = coop.exclusive_scan(padded, &total);
      visit(first + i * Coop::lanes + coop.lane, Segment{start + before, mine, padded});
      start += total;
    }
  }
  return start;
}

// Scratch of routing, in int32: a histogram for each coop of the routing CTAs, and for each routing CTA; per expert the
// first row of this rank's share, and the rows of all ranks; per rank the rows it needs. If rows may be dropped, three
// tables [ranks, experts] follow (Overfull). A histogram has a bin per expert, and one for invalid ids.
constexpr int kMaxRouters = 16;
JAX_EP_CONSTANT_FN int64_t histogram_ints(int num_experts) { return num_experts + 1; }
JAX_EP_CONSTANT_FN int64_t cta_bins_offset(int num_experts) {
  return kMaxRouters * kMaxCtaCoops * histogram_ints(num_experts);
}
JAX_EP_CONSTANT_FN int64_t first_rows_offset(int num_experts) {
  return cta_bins_offset(num_experts) + kMaxRouters * histogram_ints(num_experts);
}
JAX_EP_CONSTANT_FN int64_t totals_offset(int num_experts) { return first_rows_offset(num_experts) + num_experts; }
JAX_EP_CONSTANT_FN int64_t needed_offset(int num_experts) { return totals_offset(num_experts) + num_experts; }
JAX_EP_CONSTANT_FN int64_t shifts_offset(int num_experts, int ranks) { return needed_offset(num_experts) + ranks; }
JAX_EP_CONSTANT_FN int64_t ends_offset(int num_experts, int ranks) {
  return shifts_offset(num_experts, ranks) + int64_t{ranks} * num_experts;
}
JAX_EP_CONSTANT_FN int64_t chosen_offset(int num_experts, int ranks) {
  return ends_offset(num_experts, ranks) + int64_t{ranks} * num_experts;
}
JAX_EP_CONSTANT_FN int64_t route_scratch_ints(int num_experts, int ranks, bool drop) {
  return drop ? chosen_offset(num_experts, ranks) + int64_t{ranks} * num_experts : shifts_offset(num_experts, ranks);
}

struct RouteScratch {
  int32_t* ints;
  int num_experts, ranks;

  JAX_EP_FN int32_t* first_rows() const { return ints + first_rows_offset(num_experts); }
  JAX_EP_FN int32_t* totals() const { return ints + totals_offset(num_experts); }
  JAX_EP_FN int32_t* needed() const { return ints + needed_offset(num_experts); }
  JAX_EP_FN int32_t* shifts() const { return ints + shifts_offset(num_experts, ranks); }
  JAX_EP_FN int32_t* ends() const { return ints + ends_offset(num_experts, ranks); }
  JAX_EP_FN int32_t* chosen() const { return ints + chosen_offset(num_experts, ranks); }
};

// CTAs that take part in routing.
JAX_EP_FN int router_ctas(int assignments, int per_cta, int ctas) {
  const int wanted = ceil_div(assignments, per_cta);
  return larger(1, smaller(wanted, smaller(ctas, kMaxRouters)));
}

}  // namespace jax_ep
