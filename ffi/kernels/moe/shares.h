// Who gets the rows of a rank that has too few, where a dispatch may drop: max-min fair shares, first for its experts,
// then for the source ranks of each expert.
#pragma once

#include "comm/heap.h"
#include "comm/layout.h"
#include "kernels/moe/rows.h"

namespace jax_ep {

// What each member gets at most: `level`, and one more before member `until`.
struct Shares {
  int level, until;

  JAX_EP_FN int of(int member) const { return level + (member < until); }
};

// The last value up to `high` that fits, as all before it do; 0 does.
template <class Fits>
JAX_EP_FN int last_to_fit(int high, Fits fits) {
  int low = 0;
  while (low < high) {
    const int middle = low + (high - low + 1) / 2;
    if (fits(middle))
      low = middle;
    else
      high = middle - 1;
  }
  return low;
}

// The largest shares that fit `room`, where sum_of(shares) is what the members take of them, each no more than it asks
// for.
template <class Sum>
JAX_EP_FN Shares fair_shares(int members, int room, Sum sum_of) {
  const int level = last_to_fit(room, [&](int level) { return sum_of(Shares{level, 0}) <= room; });
  return {level, last_to_fit(members, [&](int until) { return sum_of(Shares{level, until}) <= room; })};
}

// The shares of a rank's experts, in blocks of `alignment` rows, by `counts` [sources, local_experts]. All lanes call.
JAX_EP_COLD_FN Shares share_blocks(Coop coop, const int32_t* counts, int sources, int local_experts, int alignment,
                                   int capacity) {
  const RowCounts rows_of{counts, sources, local_experts, -1};
  return fair_shares(local_experts, capacity / alignment, [&](Shares blocks) {
    int sum = 0;
    for (int e = coop.lane; e < local_experts; e += Coop::lanes)
      sum += smaller(ceil_div(rows_of(e), alignment), blocks.of(e));
    return coop.sum(sum);
  });
}

// A rank that is asked for more rows than it has. Its rows are numbered as if there were room for all; the tables of
// scratch, [ranks, experts], say which rows the numbers of a source become: those before `ends`, once `shifts` is
// added.
struct Overfull {
  RouteScratch scratch;
  int owner, rank;  // the rank, and the one that works this out, as all do
  int capacity, alignment;
  int assignments;   // of each source
  bool few;          // tokens: their choices are counted into `ends`
  const Mail* mail;  // a box for each source
  int32_t* sizes;    // [L] group sizes of `rank`

  JAX_EP_FN int at(int source, int expert) const { return source * scratch.num_experts + expert; }
  JAX_EP_FN int count(int source, int expert) const {
    return few ? scratch.ends()[at(source, expert)] : mail[source].counts[expert];
  }
};

// Counts what few tokens chose of the experts [first, end). All lanes call.
JAX_EP_FN void count_choices(const Coop& coop, const Overfull& over, int first, int end) {
  int32_t* const counts = over.scratch.ends();
  for (int source = 0; source < over.scratch.ranks; ++source)
    for (int e = first + coop.lane; e < end; e += Coop::lanes) counts[over.at(source, e)] = 0;
  coop.sync();
  for (int source = 0; source < over.scratch.ranks; ++source)
    for (int i = coop.lane; i < over.assignments; i += Coop::lanes)
      if (const int e = over.mail[source].counts[i]; e >= first && e < end) atomic_add(&counts[over.at(source, e)], 1);
  coop.sync();
}

// Shares out the rows of an expert. Odd rows go to the sources from number `expert` modulo the ranks on, so that it is
// not always the same ones that lose rows. One lane calls.
JAX_EP_FN void share_segment(const Overfull& over, int expert, const Segment& segment) {
  const int ranks = over.scratch.ranks, begin = expert % ranks;
  const auto kept = [&](int source, Shares shares) {
    const int member = source < begin ? source - begin + ranks : source - begin;
    return smaller(over.count(source, expert), shares.of(member));
  };
  const Shares shares = fair_shares(ranks, segment.rows, [&](Shares tried) {
    int sum = 0;
    JAX_EP_ROLLED
    for (int source = 0; source < ranks; ++source) sum += kept(source, tried);
    return sum;
  });
  int number = segment.start, row = segment.start;
  JAX_EP_ROLLED
  for (int source = 0; source < ranks; ++source) {
    const int at = over.at(source, expert), end = number + over.count(source, expert);
    if (source == (over.few ? 0 : over.rank)) over.scratch.first_rows()[expert] = number;
    over.scratch.shifts()[at] = row - number;
    row += kept(source, shares);
    over.scratch.ends()[at] = row;
    number = end;
  }
}

// Shares out the rows of the rank, and sets its `totals` to what its experts keep. All lanes of one coop call. By
// value: a call that is not inlined would force variables of the caller into memory.
JAX_EP_COLD_FN void share_rows(Coop coop, Overfull over) {
  const int ranks = over.scratch.ranks, local = over.scratch.num_experts / ranks, first = over.owner * local;
  int32_t* const rows = over.scratch.totals() + first;
  if (over.few) count_choices(coop, over, first, first + local);
  for (int e = coop.lane; e < local; e += Coop::lanes) {
    int sum = 0;
    for (int source = 0; source < ranks; ++source) sum += over.count(source, first + e);
    rows[e] = sum;
  }
  coop.sync();
  const Shares blocks = share_blocks(coop, rows, 1, local, over.alignment, over.capacity);
  const auto rows_of = [&](int e) { return smaller(rows[e], blocks.of(e) * over.alignment); };
  for_each_segment(coop, local, over.alignment, rows_of, [&](int e, const Segment& segment) {
    if (e >= local) return;
    share_segment(over, first + e, segment);
    rows[e] = segment.rows;
    if (over.owner == over.rank) over.sizes[e] = segment.padded;
  });
}

}  // namespace jax_ep
