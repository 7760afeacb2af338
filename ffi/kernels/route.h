// Routing: every rank counts its assignments per expert, exchanges the counts, and derives the row of each of its
// assignments. Rows are ordered by (expert, source rank, token, k), whatever the number of teams.
#pragma once

#include "kernels/args.h"
#include "kernels/op.h"

namespace jax_ep {

struct RouteScratch {
  int32_t* ints;
  int num_experts;

  JAX_EP_FN int32_t* histogram(int team) const { return ints + team * histogram_ints(num_experts); }
  JAX_EP_FN int32_t* first_rows() const { return ints + first_rows_offset(num_experts); }
  JAX_EP_FN int32_t* needed() const { return ints + needed_offset(num_experts); }
  // The two counters behind a team's histogram.
  JAX_EP_FN int32_t& invalid(int team) const { return histogram(team)[num_experts]; }
  JAX_EP_FN int32_t& dropped(int team) const { return histogram(team)[num_experts + 1]; }
};

// The histogram bin of an expert id; -1 for a skipped assignment. Ids out of range share the bin behind the last.
JAX_EP_FN int histogram_bin(int expert, int num_experts) {
  if (expert == -1) return -1;
  return expert >= 0 && expert < num_experts ? expert : num_experts;
}

// Calls visit(index, bin, earlier) for the assignments of this team's tokens; `earlier` is the number of this team's
// assignments before it in the same bin.
template <class Visit>
JAX_EP_FN void for_each_assignment(const DispatchArgs& args, const RouteScratch& scratch, const Team& team,
                                   Visit visit) {
  int32_t* bins = scratch.histogram(team.index);
  const Range mine = share(args.num_tokens, team.index, team.count);
  const int end = mine.end * args.top_k;
  for (int first = mine.begin * args.top_k; first < end; first += Team::lanes) {
    const int index = first + team.lane;
    const int bin = index < end ? histogram_bin(args.expert_ids[index], args.num_experts) : -1;
    const Match match = team.match(bin);
    const int earlier = bin < 0 ? 0 : bins[bin] + match.below;
    team.sync();
    if (bin >= 0 && match.below == match.total - 1) bins[bin] = earlier + 1;
    team.sync();
    if (index < end) visit(index, bin, earlier);
  }
}

JAX_EP_FN void count_assignments(const DispatchArgs& args, const RouteScratch& scratch, const Team& team) {
  int32_t* bins = scratch.histogram(team.index);
  for (int i = team.lane; i < histogram_ints(args.num_experts); i += Team::lanes) bins[i] = 0;
  team.sync();
  for_each_assignment(args, scratch, team, [](int, int, int) {});
}

// Turns the teams' histograms into the place of each team's first assignment within its expert, and sends the totals.
JAX_EP_FN void send_counts(Op& op, const DispatchArgs& args, const RouteScratch& scratch) {
  const Team& team = op.team;
  const int experts = args.num_experts;
  if (op.ok() && team.index == 0) {
    int invalid = 0;
    for (int i = team.lane; i < team.count; i += Team::lanes) invalid += scratch.invalid(i);
    invalid = team.sum(invalid);
    if (team.lane == 0) *args.invalid = invalid;
  }
  for (int e = team.index * Team::lanes + team.lane; op.ok() && e < experts; e += team.count * Team::lanes) {
    int total = 0;
    for (int i = 0; i < team.count; ++i) {
      const int32_t count = scratch.histogram(i)[e];
      scratch.histogram(i)[e] = total;
      total += count;
    }
    for (int peer = 0; peer < op.comm.size; ++peer) op.mail(peer, op.comm.rank)->counts[e] = total;
  }
}

// From all ranks' counts: the segments of every rank, and in them the first row of this rank's share.
JAX_EP_FN void lay_out(Op& op, const DispatchArgs& args, const RouteScratch& scratch) {
  const Comm& comm = op.comm;
  const int local = args.num_experts / comm.size;
  for (int owner = op.team.index; op.ok() && owner < comm.size; owner += op.team.count) {
    const auto count = [&](int source, int e) { return op.mail_from(source)->counts[owner * local + e]; };
    const auto rows_of = [&](int e) {
      int rows = 0;
      for (int source = 0; source < comm.size; ++source) rows += count(source, e);
      return rows;
    };
    const auto visit = [&](int e, const Segment& segment) {
      int before = 0;
      for (int source = 0; source < comm.rank; ++source) before += count(source, e);
      scratch.first_rows()[owner * local + e] = segment.start + before;
      if (owner != comm.rank) return;
      const int begin = smaller(segment.start, args.capacity);
      args.group_sizes[e] = smaller(segment.start + segment.padded, args.capacity) - begin;
      for (int source = 0; source < comm.size; ++source) args.counts[source * local + e] = count(source, e);
    };
    const int needed = for_each_segment(op.team, local, args.alignment, rows_of, visit);
    if (op.team.lane == 0) scratch.needed()[owner] = needed;
  }
  op.barrier();
}

// Whether every rank has room; all ranks come to the same answer.
JAX_EP_FN bool check_capacity(Op& op, const DispatchArgs& args, const RouteScratch& scratch) {
  if (args.drop) return true;
  for (int rank = 0; rank < op.comm.size; ++rank) {
    const int needed = scratch.needed()[rank];
    if (needed <= args.capacity) continue;
    if (op.team.index == 0 && op.team.lane == 0) op.report(Failure::capacity, rank, rank, args.capacity, needed);
    return false;
  }
  return true;
}

// Writes the targets of this team's assignments.
JAX_EP_FN void place(Op& op, const DispatchArgs& args, const RouteScratch& scratch) {
  const int local = args.num_experts / op.comm.size;
  int dropped = 0;
  for_each_assignment(args, scratch, op.team, [&](int index, int bin, int earlier) {
    int packed = -1;
    if (bin >= 0 && bin < args.num_experts) {
      const Target target{bin / local, scratch.first_rows()[bin] + earlier};
      if (target.row < args.capacity)
        packed = pack_target(target, args.capacity);
      else
        ++dropped;
    }
    args.targets[index] = packed;
  });
  dropped = op.team.sum(dropped);
  if (op.team.lane == 0) scratch.dropped(op.team.index) = dropped;
  op.team.sync();
}

// The whole of routing. `buffers` are what peers write into. Returns whether rows may be sent.
JAX_EP_FN bool route(Op& op, const DispatchArgs& args, const RouteScratch& scratch, void* landing) {
  count_assignments(args, scratch, op.team);
  op.barrier();
  send_counts(op, args, scratch);
  op.post(landing, args.rows, args.arrived);
  op.wait_posted();
  lay_out(op, args, scratch);
  if (!op.ok() || !check_capacity(op, args, scratch)) return false;
  place(op, args, scratch);
  return true;
}

}  // namespace jax_ep
