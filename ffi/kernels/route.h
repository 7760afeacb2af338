// Routing: every rank counts its assignments per expert, exchanges the counts, and derives the row of each of its
// assignments. Rows are ordered by (expert, source rank, token, k), whatever the number of teams.
//
// The first squads of a rank, the routers, do it. A squad's teams keep their histograms in shared memory.
#pragma once

#include "kernels/args.h"
#include "kernels/op.h"
#include "kernels/peer_buffer.h"

namespace jax_ep {

class Router {
 public:
  JAX_EP_FN Router(Op& op, const DispatchArgs& args)
      : op_(op),
        args_(args),
        squads_(router_squads(args.num_tokens * args.top_k, op.team.squad.count)),
        local_(args.num_experts / op.comm.size) {}

  // The whole of routing; `landing` is what peers write into. Returns whether rows may be sent.
  JAX_EP_FN bool route(void* landing) {
    if (routes()) {
      count_all();
      op_.post(landing, args_.rows, args_.arrived, args_.scales);
      op_.wait_posted();
      place_all();
    }
    op_.barrier();
    return settled();
  }

  // The same while rows are on their way already, to where they land by source and token: other teams do not wait for
  // it before settled_everywhere(), which returns whether all rows have their places.
  JAX_EP_FN void route_beside() {
    if (!routes()) return;
    count_all();
    op_.tell(&Heap::counted);
    op_.wait_told(&Heap::counted);
    op_.wait_posted();
    place_all();
    op_.router_barrier(squads_);
    op_.tell(&Heap::placed);
  }
  JAX_EP_FN bool settled_everywhere() {
    op_.wait_told(&Heap::placed);
    return settled();
  }

 private:
  JAX_EP_FN bool routes() const { return op_.team.squad.index < squads_; }

  // After it the peers have this rank's counts.
  JAX_EP_FN void count_all() {
    op_.enter(Phase::count);
    count();
    sum_over_squad();
    if (squads_ > 1) {
      op_.router_barrier(squads_);
      sum_over_squads();
    }
    op_.router_barrier(squads_);
  }

  // From the counts of all.
  JAX_EP_FN void place_all() {
    op_.enter(Phase::layout);
    lay_out();
    op_.router_barrier(squads_);
    if (op_.ok() && rank_without_room() < 0) place();  // after it peers must be waited for
  }

  JAX_EP_FN bool settled() {
    if (!op_.ok() || !check_capacity()) return false;
    sum_dropped();
    return true;
  }

  JAX_EP_FN void sum_dropped() const {
    if (op_.team.index != 0) return;
    int dropped = 0;
    for (int i = op_.team.lane; i < squads_; i += Team::lanes) dropped += squad_bins(i)[args_.num_experts + 1];
    dropped = op_.team.sum(dropped);
    if (op_.team.lane == 0) *args_.dropped = dropped;
  }

  // This team's histogram, or that of another member of its squad.
  JAX_EP_FN int32_t* bins(int member) const {
    const Team& team = op_.team;
    const int64_t ints = histogram_ints(args_.num_experts);
    if (team.shared_bytes >= ints * 4)
      return reinterpret_cast<int32_t*>(team.shared + (member - team.member.index) * team.shared_bytes);
    return args_.scratch + (team.index + member - team.member.index) * ints;
  }
  JAX_EP_FN int32_t* squad_bins(int squad) const {
    return args_.scratch + squad_bins_offset(args_.num_experts) + squad * histogram_ints(args_.num_experts);
  }
  JAX_EP_FN int32_t* first_rows() const { return args_.scratch + first_rows_offset(args_.num_experts); }
  JAX_EP_FN int32_t* needed() const { return args_.scratch + needed_offset(args_.num_experts); }

  JAX_EP_FN Range my_tokens() const {
    const Team& team = op_.team;
    const Range squad = share(args_.num_tokens, team.squad.index, squads_);
    const Range mine = share(squad.end - squad.begin, team.member.index, team.member.count);
    return {squad.begin + mine.begin, squad.begin + mine.end};
  }

  // The bin of an expert id; -1 for a skipped assignment. Ids out of range share the bin behind the last.
  JAX_EP_FN int bin_of(int expert) const {
    if (expert == -1) return -1;
    return expert >= 0 && expert < args_.num_experts ? expert : args_.num_experts;
  }

  // Calls visit(index, bin, earlier, value_of(index)) for the assignments of this team's tokens; `earlier` is what the
  // bin held before it. Every visit adds one to its bin. All lanes call together, with index -1 beyond the last, and
  // what is read from memory is read a few steps ahead.
  template <class ValueOf, class Visit>
  JAX_EP_FN void for_each_assignment(ValueOf value_of, Visit visit) {
    const Range tokens = my_tokens();
    const int end = tokens.end * args_.top_k;
    for (int first = tokens.begin * args_.top_k; first < end; first += kAhead * Team::lanes) {
      int ids[kAhead];
      decltype(value_of(0)) values[kAhead];
      for (int i = 0; i < kAhead; ++i) {
        const int index = first + i * Team::lanes + op_.team.lane;
        ids[i] = index < end ? args_.expert_ids[index] : -1;
        values[i] = value_of(smaller(index, end - 1));
      }
      for (int i = 0; i < kAhead && first + i * Team::lanes < end; ++i) {
        const int index = first + i * Team::lanes + op_.team.lane, bin = bin_of(ids[i]);
        const int earlier = count_one(bin);
        visit(index < end ? index : -1, bin, earlier, values[i]);
      }
    }
  }

  // Adds this lane's assignment to its bin, behind those of the lanes before it.
  JAX_EP_FN int count_one(int bin) {
    const Team& team = op_.team;
    int32_t* mine = bins(team.member.index);
    const Match match = team.match(bin);
    const int earlier = bin < 0 ? 0 : mine[bin] + match.below;
    team.sync();
    if (bin >= 0 && match.below == match.total - 1) mine[bin] = earlier + 1;
    team.sync();
    return earlier;
  }

  JAX_EP_FN void count() {
    int32_t* mine = bins(op_.team.member.index);
    for (int i = op_.team.lane; i < histogram_ints(args_.num_experts); i += Team::lanes) mine[i] = 0;
    op_.team.sync();
    for_each_assignment([](int) { return 0; }, [](int, int, int, int) {});
    op_.team.squad_sync();
  }

  // Turns the members' histograms into what the members before each counted, and sums them up.
  JAX_EP_FN void sum_over_squad() {
    const Team& team = op_.team;
    for (int e = team.member.index * Team::lanes + team.lane; e <= args_.num_experts;
         e += team.member.count * Team::lanes) {
      int total = 0;
      for (int member = 0; member < team.member.count; ++member) {
        const int32_t count = bins(member)[e];
        bins(member)[e] = total;
        total += count;
      }
      squad_bins(team.squad.index)[e] = squads_ == 1 ? 0 : total;
      if (squads_ == 1) publish(e, total);
    }
    if (team.member.index == 0 && team.lane == 0) squad_bins(team.squad.index)[args_.num_experts + 1] = 0;
  }

  // The same over squads; the totals go to every peer.
  JAX_EP_FN void sum_over_squads() {
    const Team& team = op_.team;
    for (int e = team.index * Team::lanes + team.lane; op_.ok() && e <= args_.num_experts;
         e += squads_ * team.member.count * Team::lanes) {
      int32_t before[kMaxRouters];
      for (int squad = 0; squad < kMaxRouters; ++squad) before[squad] = squad < squads_ ? squad_bins(squad)[e] : 0;
      int total = 0;
      for (int squad = 0; squad < kMaxRouters; ++squad) {
        if (squad < squads_) squad_bins(squad)[e] = total;
        total += before[squad];
      }
      publish(e, total);
    }
  }

  // What this rank sends to an expert, told to every peer.
  JAX_EP_FN void publish(int e, int total) {
    if (!op_.ok()) return;
    if (e == args_.num_experts)
      *args_.invalid = total;
    else
      for (int peer = 0; peer < op_.comm.size; ++peer) op_.mail(peer, op_.comm.rank)->counts[e] = total;
  }

  // From all ranks' counts: the segments of every rank, and in them the first row of this rank's share.
  JAX_EP_FN void lay_out() {
    const Comm& comm = op_.comm;
    for (int owner = op_.team.index; op_.ok() && owner < comm.size; owner += squads_ * op_.team.member.count) {
      const auto count = [&](int source, int e) { return op_.mail_from(source)->counts[owner * local_ + e]; };
      const auto rows_of = [&](int e) {
        int rows = 0;
        for (int source = 0; source < comm.size; ++source) rows += count(source, e);
        return rows;
      };
      const auto visit = [&](int e, const Segment& segment) {
        if (e >= local_) return;
        int before = 0;
        for (int source = 0; source < comm.rank; ++source) before += count(source, e);
        first_rows()[owner * local_ + e] = segment.start + before;
        if (owner != comm.rank) return;
        const int begin = smaller(segment.start, args_.capacity);
        args_.group_sizes[e] = smaller(segment.start + segment.padded, args_.capacity) - begin;
        for (int first = 0; first < comm.size; first += kAhead) {
          int32_t counts[kAhead];
          for (int i = 0; i < kAhead; ++i) counts[i] = count(smaller(first + i, comm.size - 1), e);
          for (int i = 0; i < kAhead; ++i)
            if (first + i < comm.size) args_.counts[(first + i) * local_ + e] = counts[i];
        }
      };
      const int rows = for_each_segment(op_.team, local_, args_.alignment, rows_of, visit);
      if (op_.team.lane == 0) needed()[owner] = rows;
    }
  }

  // The first rank that would receive more than its capacity, or -1. All ranks come to the same answer.
  JAX_EP_FN int rank_without_room() const {
    if (args_.drop) return -1;
    for (int first = 0; first < op_.comm.size; first += Team::lanes) {
      const int rank = first + op_.team.lane, rows = rank < op_.comm.size ? needed()[rank] : 0;
      const uint64_t full = op_.team.ballot(rows > args_.capacity);
      if (full) return first + lowest_bit(full);
    }
    return -1;
  }

  JAX_EP_FN bool check_capacity() const {
    const int rank = rank_without_room();
    if (rank >= 0 && op_.team.index == 0 && op_.team.lane == 0)
      op_.report(Failure::capacity, rank, rank, args_.capacity, needed()[rank]);
    return rank < 0;
  }

  // Writes the targets of this team's assignments, and tells every rank which of its rows hold them.
  JAX_EP_FN void place() {
    op_.enter(Phase::place);
    int32_t* bins_now = bins(op_.team.member.index);
    const int32_t* before = squad_bins(op_.team.squad.index);
    for (int first = op_.team.lane; first < args_.num_experts; first += kAhead * Team::lanes) {
      int32_t starts[kAhead];  // all on their way before the first is needed
      for (int i = 0; i < kAhead; ++i) {
        const int e = smaller(first + i * Team::lanes, args_.num_experts - 1);
        starts[i] = first_rows()[e] + before[e];
      }
      for (int i = 0; i < kAhead; ++i)
        if (const int e = first + i * Team::lanes; e < args_.num_experts) bins_now[e] += starts[i];
    }
    op_.team.sync();
    const Divider by_local(local_);
    const int64_t mine = int64_t{op_.comm.rank} * args_.num_tokens * args_.top_k;
    int dropped = 0;
    const PeerBuffer rows(op_, 1), weights(op_, 2);
    const auto weight_of = [&](int index) { return args_.weights[index]; };
    for_each_assignment(weight_of, [&](int index, int bin, int row, float weight) {
      Target target{-1, -1};
      if (bin >= 0 && bin < args_.num_experts) {
        if (row < args_.capacity)
          target = {by_local.quotient(bin), row};
        else
          ++dropped;
      }
      if (index >= 0) args_.targets[index] = target.row < 0 ? -1 : pack_target(target, args_.capacity);
      for (int rank = 0; rank < op_.comm.size; ++rank) {
        auto* rows_there = reinterpret_cast<int32_t*>(rows.of(rank)) + mine + index;
        auto* weights_there = reinterpret_cast<float*>(weights.of(rank)) + mine + index;
        if (index < 0) continue;
        *rows_there = rank == target.owner ? target.row : -1;
        *weights_there = rank == target.owner ? weight : 0.0f;
      }
    });
    dropped = op_.team.sum(dropped);
    if (op_.team.lane == 0 && dropped) atomic_add(&squad_bins(op_.team.squad.index)[args_.num_experts + 1], dropped);
  }

  // Values that a lane reads before it uses the first.
  static constexpr int kAhead = Team::lanes == 1 ? 1 : 8;

  Op& op_;
  const DispatchArgs& args_;
  const int squads_, local_;
};

}  // namespace jax_ep
