// Counting by the routers, the first squads of a rank that have begun: how many items each bin has, and which place an
// item takes among those of its bin, whatever the number of teams. A squad's teams keep their histograms in shared
// memory.
#pragma once

#include "comm/op.h"
#include "comm/squads.h"
#include "kernels/moe/args.h"

namespace jax_ep {

// An assignment, as far as routing looks at it.
struct Choice {
  int expert;
  float weight;
};

class Tally {
 public:
  // Of `items` assignments. There is a bin for every expert, and one behind them for ids out of range. All teams of a
  // squad call together.
  JAX_EP_FN Tally(Op& op, const DispatchArgs& args, int items, int per_squad)
      : op_(op),
        num_experts_(args.num_experts),
        scratch_(args.scratch),
        team_(as_router(op, router_squads(items, per_squad, op.team.squad.count))),
        squads_(team_.squad.count),
        mine_(share_of(items)) {}

  // Whether this team is one of the routers.
  JAX_EP_FN bool takes_part() const { return team_.squad.index >= 0; }
  // Among the routers: the first team, and the place of this one.
  JAX_EP_FN bool is_first() const { return team_.index == 0; }
  JAX_EP_FN bool is_first_squad() const { return team_.squad.index == 0; }
  // The last team of the first squad, which is the last to have work.
  JAX_EP_FN bool is_responsible() const { return is_first_squad() && team_.member.index == team_.member.count - 1; }
  JAX_EP_FN Place place() const { return {team_.index, team_.count}; }
  JAX_EP_FN void barrier() const { op_.router_barrier(squads_); }

  // Counts what choice_of(item) gives for every item, and calls take(bin, total) once for every bin. What was written
  // by then is seen by all routers.
  template <class ChoiceOf, class Take>
  JAX_EP_FN void count(ChoiceOf choice_of, Take take) {
    int32_t* mine = bins(team_.member.index);
    for (int i = team_.lane; i < histogram_ints(num_experts_); i += Team::lanes) mine[i] = 0;
    team_.sync();
    for_each(choice_of, [&](int, int bin, float) {
      if (bin >= 0) atomic_add(&mine[bin], 1);
    });
    team_.squad_sync();
    sum_over_squad(take);
    if (squads_ > 1) {
      barrier();
      sum_over_squads(take);
    }
    barrier();
  }

  // Calls visit(item, bin, place, weight) for this team's share, where first_of(expert) is the place of the first in a
  // bin. All lanes call together, with item -1 beyond the last and bin -1 for an assignment that is skipped.
  template <class ChoiceOf, class FirstOf, class Visit>
  JAX_EP_FN void number(ChoiceOf choice_of, FirstOf first_of, Visit visit) {
    int32_t* mine = bins(team_.member.index);
    const int32_t* before = squad_bins(team_.squad.index);
    for (int first = team_.lane; first < num_experts_; first += kAhead * Team::lanes) {
      int32_t starts[kAhead];  // all on their way before the first is needed
      for (int i = 0; i < kAhead; ++i) {
        const int e = smaller(first + i * Team::lanes, num_experts_ - 1);
        starts[i] = first_of(e) + before[e];
      }
      for (int i = 0; i < kAhead; ++i)
        if (const int e = first + i * Team::lanes; e < num_experts_) mine[e] += starts[i];
    }
    team_.sync();
    for_each(choice_of, [&](int item, int bin, float weight) { visit(item, bin, take_place(mine, bin), weight); });
  }

  // Values that a lane reads before it uses the first.
  static constexpr int kAhead = Team::lanes == 1 ? 1 : 8;

 private:
  // This team among those of the squads that route; one squad needs nobody to come.
  JAX_EP_FN static Team as_router(Op& op, int wanted) {
    const Team& team = op.team;
    if (team.squad.index >= wanted) return as_member(team, {-1, wanted});
    if (wanted == 1) return as_member(team, {0, 1});
    return as_member(team, join_squad(team, &op.heap->routing, wanted));
  }

  // This team's histogram, or that of another member of its squad.
  JAX_EP_FN int32_t* bins(int member) const {
    const Team& team = team_;
    const int64_t ints = histogram_ints(num_experts_);
    if (team.shared_bytes >= ints * 4)
      return reinterpret_cast<int32_t*>(team.shared + (member - team.member.index) * team.shared_bytes);
    return scratch_ + (team.index + member - team.member.index) * ints;
  }
  JAX_EP_FN int32_t* squad_bins(int squad) const {
    return scratch_ + squad_bins_offset(num_experts_) + squad * histogram_ints(num_experts_);
  }

  JAX_EP_FN Range share_of(int items) const {
    const Team& team = team_;
    const Range squad = share(items, team.squad.index, squads_);
    const Range mine = share(squad.end - squad.begin, team.member.index, team.member.count);
    return {squad.begin + mine.begin, squad.begin + mine.end};
  }

  // The bin of an expert id; -1 for a skipped assignment. Ids out of range share the bin behind the last.
  JAX_EP_FN int bin_of(int expert) const {
    if (expert == -1) return -1;
    return expert >= 0 && expert < num_experts_ ? expert : num_experts_;
  }

  // What is read from memory is read a few steps ahead.
  template <class ChoiceOf, class Visit>
  JAX_EP_FN void for_each(ChoiceOf choice_of, Visit visit) {
    if (!op_.ok()) return;  // what peers did not send in time must not be looked at
    for (int first = mine_.begin; first < mine_.end; first += kAhead * Team::lanes) {
      if (first != ahead_from_)
        for (int i = 0; i < kAhead; ++i)
          ahead_[i] = choice_of(smaller(first + i * Team::lanes + team_.lane, mine_.end - 1));
      ahead_from_ = first;
      for (int i = 0; i < kAhead && first + i * Team::lanes < mine_.end; ++i) {
        const int item = first + i * Team::lanes + team_.lane;
        const int bin = item < mine_.end ? bin_of(ahead_[i].expert) : -1;
        visit(item < mine_.end ? item : -1, bin, ahead_[i].weight);
      }
    }
  }

  // The next place in this lane's bin, behind those of the lanes before it.
  JAX_EP_FN int take_place(int32_t* mine, int bin) const {
    const Team& team = team_;
    const Match match = team.match(bin);
    const int next = bin < 0 ? 0 : mine[bin] + match.below;
    team.sync();
    if (bin >= 0 && match.below == match.total - 1) mine[bin] = next + 1;
    team.sync();
    return next;
  }

  // Turns the members' histograms into what the members before each counted, and sums them up.
  template <class Take>
  JAX_EP_FN void sum_over_squad(Take take) {
    const Team& team = team_;
    for (int e = team.member.index * Team::lanes + team.lane; e <= num_experts_; e += team.member.count * Team::lanes) {
      int total = 0;
      for (int member = 0; member < team.member.count; ++member) {
        const int32_t count = bins(member)[e];
        bins(member)[e] = total;
        total += count;
      }
      squad_bins(team.squad.index)[e] = squads_ == 1 ? 0 : total;
      if (squads_ == 1 && op_.ok()) take(e, total);
    }
  }

  // The same over squads.
  template <class Take>
  JAX_EP_FN void sum_over_squads(Take take) {
    const Team& team = team_;
    for (int e = team.index * Team::lanes + team.lane; op_.ok() && e <= num_experts_;
         e += place().count * Team::lanes) {
      int32_t before[kMaxRouters];
      for (int squad = 0; squad < kMaxRouters; ++squad) before[squad] = squad < squads_ ? squad_bins(squad)[e] : 0;
      int total = 0;
      for (int squad = 0; squad < kMaxRouters; ++squad) {
        if (squad < squads_) squad_bins(squad)[e] = total;
        total += before[squad];
      }
      take(e, total);
    }
  }

  Op& op_;
  const int num_experts_;
  int32_t* const scratch_;
  const Team team_;
  const int squads_;
  const Range mine_;
  Choice ahead_[kAhead];  // of a lane's items from ahead_from_ on: a small share is read only once
  int ahead_from_ = -1;
};

}  // namespace jax_ep
