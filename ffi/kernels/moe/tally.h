// Counting by the routers, the first CTAs of a rank that have begun: how many items each bin has, and which
// position an item takes among those of its bin, whatever the number of coops. A CTA's coops keep their histograms in
// shared memory.
#pragma once

#include "comm/ctas.h"
#include "comm/op.h"
#include "kernels/moe/args.h"

namespace jax_ep {

// An assignment, as far as routing looks at it.
struct Choice {
  int expert;
  float weight;
};

class Tally {
 public:
  // All coops of a CTA call together. Counts `items` assignments: there is a bin for every expert, and one behind them
  // for ids out of range.
  JAX_EP_FN Tally(Op& op, const DispatchArgs& args, int items, int per_cta)
      : op_(op),
        num_experts_(args.num_experts),
        scratch_(args.scratch),
        coop_(as_router(op, router_ctas(items, per_cta, op.coop.cta.count))),
        ctas_(coop_.cta.count),
        mine_(share_of(items)) {}

  // Whether this coop is one of the routers.
  JAX_EP_FN bool routes() const { return !coop_.cta.empty(); }
  // Among the routers: whether this coop is the first, and its part.
  JAX_EP_FN bool is_first() const { return coop_.index == 0; }
  JAX_EP_FN bool is_first_cta() const { return coop_.cta.index == 0; }
  // The last coop of the first CTA, which is the last to have work.
  JAX_EP_FN bool is_responsible() const { return is_first_cta() && coop_.member.index == coop_.member.count - 1; }
  JAX_EP_FN Part part() const { return {coop_.index, coop_.count}; }
  JAX_EP_FN void barrier() const { op_.router_barrier(ctas_); }

  // Counts what choice_of(item) gives for every item, and calls take(bin, total) once for every bin. What was written
  // by then is seen by all routers.
  template <class ChoiceOf, class Take>
  JAX_EP_FN void count(ChoiceOf choice_of, Take take) {
    int32_t* mine = bins(coop_.member.index);
    for (int i = coop_.lane; i < histogram_ints(num_experts_); i += Coop::lanes) mine[i] = 0;
    coop_.sync();
    for_each(choice_of, [&](int, int bin, float) {
      if (bin >= 0) atomic_add(&mine[bin], 1);
    });
    coop_.cta_sync();
    sum_over_cta(take);
    if (ctas_ > 1) {
      barrier();
      sum_over_ctas(take);
    }
    barrier();
  }

  // Calls visit(item, bin, position, weight) for this coop's share, where first_of(expert) is the position of the first
  // in a bin. All lanes call together, with item -1 beyond the last and bin -1 for an assignment that is skipped.
  template <class ChoiceOf, class FirstOf, class Visit>
  JAX_EP_FN void number(ChoiceOf choice_of, FirstOf first_of, Visit visit) {
    int32_t* mine = bins(coop_.member.index);
    const int32_t* before = cta_bins(coop_.cta.index);
    for (int first = coop_.lane; first < num_experts_; first += kAhead * Coop::lanes) {
      int32_t starts[kAhead];  // all on their way before the first is needed
      for (int i = 0; i < kAhead; ++i) {
        const int e = smaller(first + i * Coop::lanes, num_experts_ - 1);
        starts[i] = first_of(e) + before[e];
      }
      for (int i = 0; i < kAhead; ++i)
        if (const int e = first + i * Coop::lanes; e < num_experts_) mine[e] += starts[i];
    }
    coop_.sync();
    for_each(choice_of, [&](int item, int bin, float weight) { visit(item, bin, take_position(mine, bin), weight); });
  }

  // Values that a lane reads before it uses the first.
  static constexpr int kAhead = Coop::lanes == 1 ? 1 : 8;

 private:
  // This coop among those of the CTAs that route; one CTA needs nobody to come.
  JAX_EP_FN static Coop as_router(Op& op, int wanted) {
    const Coop& coop = op.coop;
    if (coop.cta.index >= wanted) return as_member(coop, {});
    if (wanted == 1) return as_member(coop, {0, 1});
    return as_member(coop, join_cta(coop, &op.heap->routers_begun, wanted));
  }

  // This coop's histogram, or that of another member of its CTA.
  JAX_EP_FN int32_t* bins(int member) const {
    const Coop& coop = coop_;
    const int64_t ints = histogram_ints(num_experts_);
    if (coop.shared_bytes >= ints * 4)
      return reinterpret_cast<int32_t*>(coop.shared + (member - coop.member.index) * coop.shared_bytes);
    return scratch_ + (coop.index + member - coop.member.index) * ints;
  }
  JAX_EP_FN int32_t* cta_bins(int cta) const {
    return scratch_ + cta_bins_offset(num_experts_) + cta * histogram_ints(num_experts_);
  }

  JAX_EP_FN Range share_of(int items) const {
    const Coop& coop = coop_;
    if (!routes()) return {0, 0};
    const Range cta = share(items, coop.cta.index, ctas_);
    const Range mine = share(cta.end - cta.begin, coop.member.index, coop.member.count);
    return {cta.begin + mine.begin, cta.begin + mine.end};
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
    for (int first = mine_.begin; first < mine_.end; first += kAhead * Coop::lanes) {
      if (first != ahead_from_)
        for (int i = 0; i < kAhead; ++i)
          ahead_[i] = choice_of(smaller(first + i * Coop::lanes + coop_.lane, mine_.end - 1));
      ahead_from_ = first;
      Choice left[kAhead];
      for (int i = 0; i < kAhead; ++i) left[i] = ahead_[i];
      JAX_EP_ROLLED
      for (int i = 0; i < kAhead && first + i * Coop::lanes < mine_.end; ++i) {
        const int item = first + i * Coop::lanes + coop_.lane;
        const Choice next = pop_front(left);
        const int bin = item < mine_.end ? bin_of(next.expert) : -1;
        visit(item < mine_.end ? item : -1, bin, next.weight);
      }
    }
  }

  // The next position in this lane's bin, behind those of the lanes before it.
  JAX_EP_FN int take_position(int32_t* mine, int bin) const {
    const Coop& coop = coop_;
    const Match match = coop.match(bin);
    const int next = bin < 0 ? 0 : mine[bin] + match.below;
    coop.sync();
    if (bin >= 0 && match.below == match.total - 1) mine[bin] = next + 1;
    coop.sync();
    return next;
  }

  // Turns the members' histograms into what the members before each counted, and sums them up.
  template <class Take>
  JAX_EP_FN void sum_over_cta(Take take) {
    const Coop& coop = coop_;
    for (int e = coop.member.index * Coop::lanes + coop.lane; e <= num_experts_; e += coop.member.count * Coop::lanes) {
      int total = 0;
      for (int member = 0; member < coop.member.count; ++member) {
        const int32_t count = bins(member)[e];
        bins(member)[e] = total;
        total += count;
      }
      cta_bins(coop.cta.index)[e] = ctas_ == 1 ? 0 : total;
      if (ctas_ == 1 && op_.ok()) take(e, total);
    }
  }

  // Turns the CTAs' histograms into what the CTAs before each counted, and sums them up.
  template <class Take>
  JAX_EP_FN void sum_over_ctas(Take take) {
    const Coop& coop = coop_;
    for (int e = coop.index * Coop::lanes + coop.lane; op_.ok() && e <= num_experts_; e += part().count * Coop::lanes) {
      int32_t before[kMaxRouters];
      for (int cta = 0; cta < kMaxRouters; ++cta) before[cta] = cta < ctas_ ? cta_bins(cta)[e] : 0;
      int total = 0;
      for (int cta = 0; cta < kMaxRouters; ++cta) {
        if (cta < ctas_) cta_bins(cta)[e] = total;
        total += before[cta];
      }
      take(e, total);
    }
  }

  Op& op_;
  const int num_experts_;
  int32_t* const scratch_;
  const Coop coop_;
  const int ctas_;
  const Range mine_;
  Choice ahead_[kAhead];  // of a lane's items from ahead_from_ on: a small share is read only once
  int ahead_from_ = -1;
};

}  // namespace jax_ep
