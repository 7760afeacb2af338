// Where the segments of every rank begin, one for each of its experts, once it is known how many rows they have.
#pragma once

#include "comm/op.h"
#include "kernels/moe/args.h"
#include "kernels/moe/shares.h"

namespace jax_ep {

class Segments {
 public:
  JAX_EP_FN Segments(Op& op, const DispatchArgs& args)
      : op_(op),
        args_(args),
        local_(args.num_experts / op.comm.size),
        scratch_{args.scratch, args.num_experts, op.comm.size} {}

  // For the owners of this coop's share: rows_of(expert) over all sources, of which before(expert) have their rows
  // before those that are placed here. `own(e)` is called for the local experts of this rank. Where rows do not fit and
  // may be dropped, they are shared out.
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
      if (args_.drop && rows > args_.capacity) share_rows(op_.coop, overfull(owner));
    }
  }

  // [E] the rows that experts are asked for, which whoever counts few tokens sets before lay_out().
  JAX_EP_FN int32_t* totals() const { return scratch_.totals(); }

  // The row of the first assignment that is to be placed of an expert.
  JAX_EP_FN int first_row(int expert) const { return scratch_.first_rows()[expert]; }

  // How many rows each expert of this rank has.
  JAX_EP_FN RowCounts counts() const {
    const int rank = op_.comm.rank, end = scratch_.needed()[rank];
    if (args_.few || (args_.drop && end > args_.capacity)) return {totals() + rank * local_, 1, local_, end};
    return {args_.counts, op_.comm.size, local_, end};
  }

  // The row of an assignment when some rank has no room for all, or -1. `row`: its row if there were room.
  JAX_EP_FN int row_kept(int source, int owner, int expert, int row) const {
    if (!args_.drop) return -1;
    if (scratch_.needed()[owner] <= args_.capacity) return row;
    const int at = source * args_.num_experts + expert, kept = row + scratch_.shifts()[at];
    return kept < scratch_.ends()[at] ? kept : -1;
  }

  // The first rank that would receive more than its capacity, or -1. All ranks come to the same answer.
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
      op_.report(Failure::capacity, rank, rank, args_.capacity, scratch_.needed()[rank]);
    return rank < 0;
  }

 private:
  JAX_EP_FN Overfull overfull(int owner) const {
    return {scratch_,         owner,
            op_.comm.rank,    args_.capacity,
            args_.alignment,  args_.num_tokens * args_.top_k,
            args_.few,        op_.mail_from(0),
            args_.group_sizes};
  }

  Op& op_;
  const DispatchArgs& args_;
  const int local_;
  const RouteScratch scratch_;
};

}  // namespace jax_ep
