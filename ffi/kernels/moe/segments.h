// Where the segments of every rank begin, one for each of its experts, once it is known how many rows they have.
#pragma once

#include "comm/op.h"
#include "kernels/moe/args.h"

namespace jax_ep {

class Segments {
 public:
  JAX_EP_FN Segments(Op& op, const DispatchArgs& args)
      : op_(op), args_(args), local_(args.num_experts / op.comm.size) {}

  // For the owners of this coop's share: rows_of(expert) over all sources, of which before(expert) have their rows
  // before those that are placed here. `own(e)` is called for the local experts of this rank.
  template <class RowsOf, class Before, class Own>
  JAX_EP_FN void lay_out(Part part, RowsOf rows_of, Before before, Own own) const {
    for (int owner = part.index; op_.ok() && owner < op_.comm.size; owner += part.count) {
      const auto visit = [&](int e, const Segment& segment) {
        if (e >= local_) return;
        first_rows()[owner * local_ + e] = segment.start + before(owner * local_ + e);
        if (owner != op_.comm.rank) return;
        const int begin = smaller(segment.start, args_.capacity);
        args_.group_sizes[e] = smaller(segment.start + segment.padded, args_.capacity) - begin;
        own(e);
      };
      const int rows = for_each_segment(
          op_.coop, local_, args_.alignment, [&](int e) { return rows_of(owner * local_ + e); }, visit);
      if (op_.coop.lane == 0) needed()[owner] = rows;
    }
  }

  // The row of the first assignment that is to be placed of an expert.
  JAX_EP_FN int first_row(int expert) const { return first_rows()[expert]; }

  // Behind the last segment of this rank.
  JAX_EP_FN int end() const { return needed()[op_.comm.rank]; }

  // The first rank that would receive more than its capacity, or -1. All ranks come to the same answer.
  JAX_EP_FN int rank_without_room() const {
    if (args_.drop) return -1;
    for (int first = 0; first < op_.comm.size; first += Coop::lanes) {
      const int rank = first + op_.coop.lane, rows = rank < op_.comm.size ? needed()[rank] : 0;
      const uint64_t full = op_.coop.ballot(rows > args_.capacity);
      if (full) return first + lowest_bit(full);
    }
    return -1;
  }

  JAX_EP_FN bool check_capacity() const {
    const int rank = rank_without_room();
    if (rank >= 0 && op_.coop.index == 0 && op_.coop.lane == 0)
      op_.report(Failure::capacity, rank, rank, args_.capacity, needed()[rank]);
    return rank < 0;
  }

 private:
  JAX_EP_FN int32_t* first_rows() const { return args_.scratch + first_rows_offset(args_.num_experts); }
  JAX_EP_FN int32_t* needed() const { return args_.scratch + needed_offset(args_.num_experts); }

  Op& op_;
  const DispatchArgs& args_;
  const int local_;
};

}  // namespace jax_ep
