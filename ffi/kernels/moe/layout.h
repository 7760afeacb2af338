// The numbering of rows, the chunks of tokens, the segments, and the scratch of a dispatch, for kernels and the host.
#pragma once

#include <cstdint>

#include "comm/integers.h"
#include "comm/platform.h"
#include "comm/signal_pad.h"

namespace jax_ep {

// A mailbox has a number per expert (RoutingByCounts) or per assignment of a rank (RoutingByAssignments).
constexpr int kMaxExperts = kMailNumbers;
constexpr int kMaxAssignments = kMailNumbers;
// Tuned with `kernels_bench 2`, and for few tokens with `kernels_bench 2 few`.
constexpr int kFewTokens = 512;         // up to this number of tokens, each token is a chunk
constexpr int kChunkTokens = 512;       // the least tokens of a chunk otherwise
constexpr int kMaxChunks = 16;          // of a source
constexpr int kEagerTokens = 1024;      // the most eager tokens of long rows; see eager_tokens()
constexpr int kMostEagerTokens = 4096;  // and of short rows
constexpr int kEagerStep = 64;
constexpr int kShortRowBytes = 8192;  // tokens with longer rows are taken one by one; 4 KiB and 14 KiB were measured
static_assert(kFewTokens <= kMaxFlags && kMaxChunks <= kMaxFlags);

// Assignments per routing CTA. Tuned with `kernels_bench 2`.
constexpr int kRoutingAssignments = Coop::lanes == 1 ? 256 : 2048;

// A row at the rank that owns an expert. Packed into one number, or -1 for none.
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

// One local expert's rows: [start, start + rows) have a token, and [start + rows, start + padded) are padding.
struct Segment {
  int start, rows, padded;
};

// Lays out the local experts in order, with a lane for each. All lanes call visit(expert, segment) together. A lane
// past the last expert has an empty segment. Returns the end of the last segment. `rows_of(expert)`: the number of its
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

constexpr int kMaxRoutingCtas = 16;

// Scratch tables of routing. A histogram has a bin for each expert, and one for invalid ids. The tables from `shifts`
// on exist if rows may be dropped (Overfull).
struct RouteScratch {
  enum Table { kCoopBins, kCtaBins, kFirstRows, kTotals, kNeeded, kShifts, kEnds, kAssignmentCounts, kTables };

  int32_t* ints;
  int num_experts, ranks;

  JAX_EP_CONSTANT_FN static int64_t ints_before(Table end, int64_t experts, int64_t ranks) {
    const int64_t bins = experts + 1;
    const auto ints_of = [&](Table table, int64_t ints) { return table < end ? ints : 0; };
    return ints_of(kCoopBins, kMaxRoutingCtas * kMaxCtaCoops * bins) + ints_of(kCtaBins, kMaxRoutingCtas * bins) +
           ints_of(kFirstRows, experts) + ints_of(kTotals, experts) + ints_of(kNeeded, ranks) +
           ints_of(kShifts, ranks * experts) + ints_of(kEnds, ranks * experts) +
           ints_of(kAssignmentCounts, ranks * experts);
  }
  JAX_EP_FN int32_t* table(Table which) const { return ints + ints_before(which, num_experts, ranks); }

  JAX_EP_FN int64_t histogram_ints() const { return num_experts + 1; }
  // The histogram of a routing coop, and of a routing CTA.
  JAX_EP_FN int32_t* coop_bins(int coop) const { return table(kCoopBins) + coop * histogram_ints(); }
  JAX_EP_FN int32_t* cta_bins(int cta) const { return table(kCtaBins) + cta * histogram_ints(); }
  JAX_EP_FN int32_t* first_rows() const { return table(kFirstRows); }  // [E] of the assignments that this rank places
  JAX_EP_FN int32_t* totals() const { return table(kTotals); }         // [E] rows of all ranks
  JAX_EP_FN int32_t* needed() const { return table(kNeeded); }         // [R] rows
  JAX_EP_FN int32_t* shifts() const { return table(kShifts); }         // [R, E]
  JAX_EP_FN int32_t* ends() const { return table(kEnds); }             // [R, E]
  JAX_EP_FN int32_t* assignment_counts() const { return table(kAssignmentCounts); }  // [R, E]
};
JAX_EP_CONSTANT_FN int64_t route_scratch_ints(int num_experts, int ranks, bool drop) {
  return RouteScratch::ints_before(drop ? RouteScratch::kTables : RouteScratch::kShifts, num_experts, ranks);
}

JAX_EP_FN int routing_ctas(int assignments, int per_cta, int ctas) {
  const int wanted = ceil_div(assignments, per_cta);
  return larger(1, smaller(wanted, smaller(ctas, kMaxRoutingCtas)));
}

}  // namespace jax_ep
