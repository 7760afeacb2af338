// The layout of every rank's rows: a segment for each of its experts. If rows must be dropped, experts get max-min fair
// quotas of a rank's rows, and source ranks get such quotas of each expert's rows. jax_ep/ops/moe/layout.py has the
// same for XLA.
#pragma once

#include "comm/op.h"
#include "comm/signal_pad.h"
#include "comm/window.h"
#include "kernels/moe/args.h"
#include "kernels/moe/layout.h"

namespace jax_ep {

struct RowCounts {
  const int32_t* counts;  // [sources, local_experts]: by rank, or one source for all ranks
  int sources, local_experts;
  int end;  // of the last segment, or -1 if it is not known

  JAX_EP_FN int operator()(int expert) const {
    int rows = 0;
    for (int source = 0; source < sources; ++source) rows += counts[source * local_experts + expert];
    return rows;
  }
};

// Each sharer gets at most `level`, or one more before `until`.
struct Quotas {
  int level, until;

  JAX_EP_FN int of(int sharer) const { return level + (sharer < until); }
};

// The largest value up to `high` that fits. 0 fits, and every value below one that fits.
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

// The largest quotas that fit `room`. sum_of(quotas): the sum over sharers of the smaller of quota and demand.
template <class Sum>
JAX_EP_FN Quotas fair_quotas(int sharers, int room, Sum sum_of) {
  const int level = last_to_fit(room, [&](int level) { return sum_of(Quotas{level, 0}) <= room; });
  return {level, last_to_fit(sharers, [&](int until) { return sum_of(Quotas{level, until}) <= room; })};
}

// The quotas of a rank's experts, in steps of `alignment` rows, by `counts` [sources, local_experts]. All lanes call.
JAX_EP_COLD_FN Quotas step_quotas(Coop coop, const int32_t* counts, int sources, int local_experts, int alignment,
                                  int capacity) {
  const RowCounts rows_of{counts, sources, local_experts, -1};
  return fair_quotas(local_experts, capacity / alignment, [&](Quotas steps) {
    int sum = 0;
    for (int e = coop.lane; e < local_experts; e += Coop::lanes)
      sum += smaller(ceil_div(rows_of(e), alignment), steps.of(e));
    return coop.sum(sum);
  });
}

// A rank that needs more rows than it has. Rows are first numbered as if there were room for all. Two scratch tables,
// [ranks, experts], turn a number into a row: an assignment's row is number + shift, and the assignment is dropped if
// that is not below `ends`. A third table, `assignment_counts`, has count() if mail has assignments.
struct Overfull {
  RouteScratch scratch;
  int owner, rank;  // the overfull rank, and this rank
  int capacity, alignment;
  int assignments;      // of each source
  bool by_assignments;  // mail has assignments, not counts
  ReceivedMail mail;
  int32_t* sizes;  // [L] group sizes of `rank`

  JAX_EP_FN int at(int source, int expert) const { return source * scratch.num_experts + expert; }
  JAX_EP_FN int count(int source, int expert) const {
    return by_assignments ? scratch.assignment_counts()[at(source, expert)] : mail.ints(source)[expert];
  }
};

// Counts the assignments to the experts [first, end), if mail has assignments. All lanes call.
JAX_EP_FN void count_by_expert(const Coop& coop, const Overfull& over, int first, int end) {
  int32_t* const counts = over.scratch.assignment_counts();
  for (int source = 0; source < over.scratch.ranks; ++source)
    for (int e = first + coop.lane; e < end; e += Coop::lanes) counts[over.at(source, e)] = 0;
  coop.sync();
  for (int source = 0; source < over.scratch.ranks; ++source)
    for (int i = coop.lane; i < over.assignments; i += Coop::lanes)
      if (const int e = over.mail.ints(source)[i]; e >= first && e < end) atomic_add(&counts[over.at(source, e)], 1);
  coop.sync();
}

// Divides the rows of an expert among its sources. Rows left over go one each to sources from `expert` modulo the ranks
// on, so that different experts favour different sources. One lane calls.
JAX_EP_FN void divide_segment(const Overfull& over, int expert, const Segment& segment) {
  const int ranks = over.scratch.ranks, begin = expert % ranks;
  const auto kept = [&](int source, Quotas quotas) {
    const int sharer = source < begin ? source - begin + ranks : source - begin;
    return smaller(over.count(source, expert), quotas.of(sharer));
  };
  const Quotas quotas = fair_quotas(ranks, segment.rows, [&](Quotas tried) {
    int sum = 0;
    JAX_EP_ROLLED
    for (int source = 0; source < ranks; ++source) sum += kept(source, tried);
    return sum;
  });
  int number = segment.start, row = segment.start;
  JAX_EP_ROLLED
  for (int source = 0; source < ranks; ++source) {
    const int at = over.at(source, expert), end = number + over.count(source, expert);
    if (source == (over.by_assignments ? 0 : over.rank)) over.scratch.first_rows()[expert] = number;
    over.scratch.shifts()[at] = row - number;
    row += kept(source, quotas);
    over.scratch.ends()[at] = row;
    number = end;
  }
}

// Divides the rows of the rank among its experts, and sets `totals` to the rows that they keep. All lanes of one coop
// call. Not inlined, so arguments are values: references would force the caller's variables into memory.
JAX_EP_COLD_FN void divide_rows(Coop coop, Overfull over) {
  const int ranks = over.scratch.ranks, local = over.scratch.num_experts / ranks, first = over.owner * local;
  int32_t* const rows = over.scratch.totals() + first;
  if (over.by_assignments) count_by_expert(coop, over, first, first + local);
  for (int e = coop.lane; e < local; e += Coop::lanes) {
    int sum = 0;
    for (int source = 0; source < ranks; ++source) sum += over.count(source, first + e);
    rows[e] = sum;
  }
  coop.sync();
  const Quotas steps = step_quotas(coop, rows, 1, local, over.alignment, over.capacity);
  const auto rows_of = [&](int e) { return smaller(rows[e], steps.of(e) * over.alignment); };
  for_each_segment(coop, local, over.alignment, rows_of, [&](int e, const Segment& segment) {
    if (e >= local) return;
    divide_segment(over, first + e, segment);
    rows[e] = segment.rows;
    if (over.owner == over.rank) over.sizes[e] = segment.padded;
  });
}

// Lays out the segments of every rank from the number of rows of each expert.
class Segments {
 public:
  JAX_EP_FN Segments(Op& op, const DispatchArgs& args)
      : op_(op),
        args_(args),
        local_(args.num_experts / op.comm.size),
        scratch_{args.route_scratch, args.num_experts, op.comm.size} {}

  // Lays out the owners of this coop's part. Writes `needed` of each owner and the first row of each of its experts;
  // for this rank also group_sizes, and calls own(e) for each local expert. Divides rows that do not fit if they may be
  // dropped. rows_of(expert): rows of all sources. before(expert): rows before those that this rank places.
  template <class RowsOf, class Before, class Own>
  JAX_EP_FN void lay_out(Part part, RowsOf rows_of, Before before, Own own) const {
    for (int owner = part.index; op_.ok() && owner < op_.comm.size; owner += part.count) {
      const auto visit = [&](int e, const Segment& segment) {
        if (e >= local_) return;
        scratch_.first_rows()[owner * local_ + e] = segment.start + before(owner * local_ + e);
        if (owner != op_.comm.rank) return;
        const int begin = smaller(segment.start, args_.capacity);
        args_.group_sizes[e] = smaller(segment.start + segment.padded, args_.capacity) - begin;
        own(e);
      };
      const int rows = for_each_segment(
          op_.coop, local_, args_.alignment, [&](int e) { return rows_of(owner * local_ + e); }, visit);
      if (op_.coop.lane == 0) scratch_.needed()[owner] = rows;
      if (args_.drop && rows > args_.capacity) divide_rows(op_.coop, overfull(owner));
    }
  }

  // [E] the assignments of each expert. With RoutingByAssignments the caller counts them before lay_out().
  JAX_EP_FN int32_t* totals() const { return scratch_.totals(); }

  // The row of the first assignment of an expert that this rank places.
  JAX_EP_FN int first_row(int expert) const { return scratch_.first_rows()[expert]; }

  JAX_EP_FN RowCounts counts() const {
    const int rank = op_.comm.rank, end = scratch_.needed()[rank];
    if (args_.by_assignments || (args_.drop && end > args_.capacity)) return {totals() + rank * local_, 1, local_, end};
    return {args_.counts, op_.comm.size, local_, end};
  }

  // The row of an assignment if some rank has too few rows, or -1. `row`: its row if there were room.
  JAX_EP_FN int row_kept(int source, int owner, int expert, int row) const {
    if (!args_.drop) return -1;
    if (scratch_.needed()[owner] <= args_.capacity) return row;
    const int at = source * args_.num_experts + expert, kept = row + scratch_.shifts()[at];
    return kept < scratch_.ends()[at] ? kept : -1;
  }

  // The first rank that would receive more than its capacity, or -1. The same on all ranks.
  JAX_EP_FN int rank_without_room() const {
    for (int first = 0; first < op_.comm.size; first += Coop::lanes) {
      const int rank = first + op_.coop.lane, rows = rank < op_.comm.size ? scratch_.needed()[rank] : 0;
      const uint64_t full = op_.coop.ballot(rows > args_.capacity);
      if (full) return first + lowest_bit(full);
    }
    return -1;
  }

  JAX_EP_FN bool check_capacity() const {
    if (args_.drop) return true;
    const int rank = rank_without_room();
    if (rank >= 0 && op_.coop.index == 0 && op_.coop.lane == 0)
      op_.report_capacity(rank, args_.capacity, scratch_.needed()[rank]);
    return rank < 0;
  }

 private:
  JAX_EP_FN Overfull overfull(int owner) const {
    return {scratch_,
            owner,
            op_.comm.rank,
            args_.capacity,
            args_.alignment,
            args_.num_tokens * args_.top_k,
            args_.by_assignments,
            ReceivedMail(op_),
            args_.group_sizes};
  }

  Op& op_;
  const DispatchArgs& args_;
  const int local_;
  const RouteScratch scratch_;
};

}  // namespace jax_ep
