// Routing: the routing coops of a rank compute the row of each assignment of a dispatch. The other coops wait for
// results that they need. The order of rows, (expert, source rank, token, k), does not depend on the number of coops.
#pragma once

#include "comm/ctas.h"
#include "comm/op.h"
#include "comm/push.h"
#include "comm/window.h"
#include "kernels/moe/args.h"
#include "kernels/moe/segments.h"

namespace jax_ep {

struct Assignment {
  int expert;
  float weight;
};

// Counts items by bin, and gives each item its position in its bin. The routing coops are those of the first CTAs to
// begin. Their histograms are in shared memory if there is room.
class Histogram {
 public:
  // `items` assignments, with a bin for every expert and one for ids out of range. All coops of a CTA call together.
  JAX_EP_FN Histogram(Op& op, const DispatchArgs& args, int items, int per_cta)
      : op_(op),
        scratch_{args.route_scratch, args.num_experts, op.comm.size},
        coop_(as_routing_coop(op, routing_ctas(items, per_cta, op.coop.cta.count))),
        ctas_(coop_.cta.count),
        mine_(part_of_coop(items)) {}

  JAX_EP_FN bool routes() const { return !coop_.cta.empty(); }
  JAX_EP_FN bool is_first() const { return coop_.index == 0; }
  JAX_EP_FN bool is_first_cta() const { return coop_.cta.index == 0; }
  // Whether this is the last coop of the first CTA, the last coop to have work.
  JAX_EP_FN bool is_responsible() const { return is_first_cta() && coop_.in_cta.index == coop_.in_cta.count - 1; }
  JAX_EP_FN Part part() const { return {coop_.index, coop_.count}; }
  JAX_EP_FN void barrier() const { op_.barrier_of_first(ctas_); }

  // Counts the experts of assignment_of(item) over all items, and calls take(bin, total) once per bin. On return all
  // routing coops see what take() wrote.
  template <class AssignmentOf, class Take>
  JAX_EP_FN void count(AssignmentOf assignment_of, Take take) {
    int32_t* mine = bins(coop_.in_cta.index);
    for (int i = coop_.lane; i < scratch_.histogram_ints(); i += Coop::lanes) mine[i] = 0;
    coop_.sync();
    for_each(assignment_of, [&](int, int bin, float) {
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

  // Calls visit(item, bin, position, weight) for this coop's part. first_of(expert) is the first position of a bin. All
  // lanes call visit together: item is -1 past the last item, bin is -1 for a skipped assignment.
  template <class AssignmentOf, class FirstOf, class Visit>
  JAX_EP_FN void number(AssignmentOf assignment_of, FirstOf first_of, Visit visit) {
    int32_t* mine = bins(coop_.in_cta.index);
    const int32_t* before = scratch_.cta_bins(coop_.cta.index);
    for (int first = coop_.lane; first < scratch_.num_experts; first += kAhead * Coop::lanes) {
      int32_t starts[kAhead];  // all loads are in flight before the first value is used
      for (int i = 0; i < kAhead; ++i) {
        const int e = smaller(first + i * Coop::lanes, scratch_.num_experts - 1);
        starts[i] = first_of(e) + before[e];
      }
      for (int i = 0; i < kAhead; ++i)
        if (const int e = first + i * Coop::lanes; e < scratch_.num_experts) mine[e] += starts[i];
    }
    coop_.sync();
    for_each(assignment_of,
             [&](int item, int bin, float weight) { visit(item, bin, take_position(mine, bin), weight); });
  }

  // Values that a lane loads before it uses the first.
  static constexpr int kAhead = Coop::lanes == 1 ? 1 : 8;

 private:
  JAX_EP_FN static Coop as_routing_coop(Op& op, int wanted) {
    const Coop& coop = op.coop;
    if (coop.cta.index >= wanted) return as_member(coop, {});
    if (wanted == 1) return as_member(coop, {0, 1});
    return as_member(coop, join_cta(coop, &op.signal_pad->first_begun, wanted));
  }

  // This coop's histogram, or that of another coop of its CTA.
  JAX_EP_FN int32_t* bins(int other) const {
    const Coop& coop = coop_;
    if (coop.shared_bytes >= scratch_.histogram_ints() * 4)
      return reinterpret_cast<int32_t*>(coop.shared + (other - coop.in_cta.index) * coop.shared_bytes);
    return scratch_.coop_bins(coop.index + other - coop.in_cta.index);
  }

  JAX_EP_FN Range part_of_coop(int items) const {
    const Coop& coop = coop_;
    if (!routes()) return {0, 0};
    const Range cta = part_of(items, coop.cta.index, ctas_);
    const Range mine = part_of(cta.end - cta.begin, coop.in_cta.index, coop.in_cta.count);
    return {cta.begin + mine.begin, cta.begin + mine.end};
  }

  // The bin of an expert id, or -1 for a skipped assignment. Ids out of range share the bin after the last expert's.
  JAX_EP_FN int bin_of(int expert) const {
    if (expert == -1) return -1;
    return expert >= 0 && expert < scratch_.num_experts ? expert : scratch_.num_experts;
  }

  template <class AssignmentOf, class Visit>
  JAX_EP_FN void for_each(AssignmentOf assignment_of, Visit visit) {
    if (!op_.ok()) return;  // mail that came too late must not be read
    for (int first = mine_.begin; first < mine_.end; first += kAhead * Coop::lanes) {
      if (first != ahead_from_)
        for (int i = 0; i < kAhead; ++i)
          ahead_[i] = assignment_of(smaller(first + i * Coop::lanes + coop_.lane, mine_.end - 1));
      ahead_from_ = first;
      Assignment left[kAhead];
      for (int i = 0; i < kAhead; ++i) left[i] = ahead_[i];
      JAX_EP_ROLLED
      for (int i = 0; i < kAhead && first + i * Coop::lanes < mine_.end; ++i) {
        const int item = first + i * Coop::lanes + coop_.lane;
        const Assignment next = pop_front(left);
        const int bin = item < mine_.end ? bin_of(next.expert) : -1;
        visit(item < mine_.end ? item : -1, bin, next.weight);
      }
    }
  }

  // The next position in this lane's bin, after those of the lanes before it.
  JAX_EP_FN int take_position(int32_t* mine, int bin) const {
    const Coop& coop = coop_;
    const Match match = coop.match(bin);
    const int next = bin < 0 ? 0 : mine[bin] + match.below;
    coop.sync();
    if (bin >= 0 && match.below == match.total - 1) mine[bin] = next + 1;
    coop.sync();
    return next;
  }

  // Replaces each coop's histogram by the sum over earlier coops of its CTA, and sums over all coops of the CTA.
  template <class Take>
  JAX_EP_FN void sum_over_cta(Take take) {
    const Coop& coop = coop_;
    for (int e = coop.in_cta.index * Coop::lanes + coop.lane; e <= scratch_.num_experts;
         e += coop.in_cta.count * Coop::lanes) {
      int total = 0;
      for (int other = 0; other < coop.in_cta.count; ++other) {
        const int32_t count = bins(other)[e];
        bins(other)[e] = total;
        total += count;
      }
      scratch_.cta_bins(coop.cta.index)[e] = ctas_ == 1 ? 0 : total;
      if (ctas_ == 1 && op_.ok()) take(e, total);
    }
  }

  // Replaces each CTA's histogram by the sum over the earlier CTAs, and sums over all CTAs.
  template <class Take>
  JAX_EP_FN void sum_over_ctas(Take take) {
    const Coop& coop = coop_;
    for (int e = coop.index * Coop::lanes + coop.lane; op_.ok() && e <= scratch_.num_experts;
         e += part().count * Coop::lanes) {
      int32_t before[kMaxRoutingCtas];
      for (int cta = 0; cta < kMaxRoutingCtas; ++cta) before[cta] = cta < ctas_ ? scratch_.cta_bins(cta)[e] : 0;
      int total = 0;
      for (int cta = 0; cta < kMaxRoutingCtas; ++cta) {
        if (cta < ctas_) scratch_.cta_bins(cta)[e] = total;
        total += before[cta];
      }
      take(e, total);
    }
  }

  Op& op_;
  const RouteScratch scratch_;
  const Coop coop_;
  const int ctas_;
  const Range mine_;
  Assignment ahead_[kAhead];  // a lane's items from ahead_from_ on
  int ahead_from_ = -1;
};

class RoutingResults {
 public:
  JAX_EP_FN RoutingResults(Op& op, const DispatchArgs& args) : op_(op), args_(args), segments_(op, args) {}

  // Waits until the rows of the local experts are counted, and returns the counts.
  JAX_EP_FN RowCounts counts() const {
    op_.wait_here(&op_.signal_pad->laid_out);
    return segments_.counts();
  }

  JAX_EP_FN void await_placed() const { op_.wait_here(&op_.signal_pad->placed[op_.comm.rank]); }

  // Waits until the assignments of all ranks have rows, and returns whether there is room for all. With
  // RoutingByAssignments this rank places all of them.
  JAX_EP_FN bool all_placed() const {
    await_placed();
    if (!args_.by_assignments) op_.wait(&SignalPad::placed);
    return op_.ok() && segments_.check_capacity();
  }

 private:
  Op& op_;
  const DispatchArgs& args_;
  const Segments segments_;
};

// Hands out the tokens of a dispatch, `per_ticket` at a time. The ticket of a token that is not eager waits for the
// rows of all tokens. There are no more tokens once the op has failed.
class RoutedTokens {
 public:
  JAX_EP_FN RoutedTokens(Op& op, const DispatchArgs& args, const RoutingResults& routed, int per_ticket)
      : op_(op), routed_(routed), eager_(args.eager), items_(op, args.num_tokens, /*own_first=*/false, per_ticket) {}

  JAX_EP_FN Range next_range() {
    const Range tokens = items_.next_range();
    if (tokens.end > eager_ && !placed_) {
      routed_.await_placed();
      op_.enter(Phase::send);
      placed_ = true;
    }
    return op_.ok() ? tokens : Range{0, 0};
  }
  JAX_EP_FN int next() {
    const Range tokens = next_range();
    return tokens.begin < tokens.end ? tokens.begin : -1;
  }
  static constexpr bool kSteals = false;  // all tokens have tickets
  JAX_EP_FN int next_stolen() const { return -1; }

 private:
  Op& op_;
  const RoutingResults& routed_;
  const int eager_;
  PushItems items_;
  bool placed_ = false;
};

// Posts the buffers of a dispatch. All coops call, before they route. The last coop of the last CTA posts, because the
// routing coops have other work. If that CTA has no SM yet, Routing::post_if_late posts.
JAX_EP_FN void post_dispatch(Op& op, const DispatchArgs& args) {
  op.record_begin(op.is_recorder());
  op.post_by(op.coop.index == (Coop::lanes == 1 ? 0 : op.coop.count - 1), window_addresses(args, op.comm.size));
}

class Routing {
 protected:
  // `items`: assignments that this rank counts. `per_cta`: assignments per routing CTA.
  JAX_EP_FN Routing(Op& op, const DispatchArgs& args, int items, int per_cta)
      : op_(op),
        args_(args),
        histogram_(op, args, items, per_cta),
        segments_(op, args),
        local_(args.num_experts / op.comm.size) {}

  // Begins to load whether this rank has posted. Called after the peers' mail has arrived. On a CPU this coop has
  // posted.
  JAX_EP_FN uint64_t ask_posted() const {
    return Coop::lanes > 1 && histogram_.is_responsible() ? op_.ask_posted() : ~uint64_t{0};
  }
  // Posts if the last CTA is late. Called after the layout or the count, with the result of ask_posted().
  JAX_EP_FN void post_if_late(uint64_t issued) {
    op_.post_by(op_.is_earlier(issued), window_addresses(args_, op_.comm.size));
  }

  JAX_EP_FN auto first_rows() const {
    return [this](int e) { return segments_.first_row(e); };
  }
  JAX_EP_FN void add_up(int count, int32_t* total) const {
    count = op_.coop.sum(count);
    if (op_.coop.lane == 0 && count) atomic_add(total, count);
  }

  Op& op_;
  const DispatchArgs& args_;
  Histogram histogram_;
  const Segments segments_;
  const int local_;
};

// Every rank counts its assignments per expert, exchanges the counts, and derives the row of each of its assignments,
// while the eager tokens travel.
class RoutingByCounts : Routing {
 public:
  JAX_EP_FN RoutingByCounts(Op& op, const DispatchArgs& args)
      : Routing(op, args, args.num_tokens * args.top_k, kRoutingAssignments) {}

  // The other coops wait for the results only where they need them: see RoutingResults.
  JAX_EP_FN void run() {
    if (!histogram_.routes()) return;
    count();
    op_.signal(&SignalPad::mailed, histogram_.is_first());
    op_.wait(&SignalPad::mailed);
    const uint64_t issued = ask_posted();
    op_.enter(Phase::layout);
    lay_out();
    post_if_late(issued);
    histogram_.barrier();
    op_.signal_here(&op_.signal_pad->laid_out, histogram_.is_first());
    op_.wait_posted();
    if (op_.ok()) place();
    histogram_.barrier();
    op_.signal(&SignalPad::placed, histogram_.is_first());
  }

 private:
  JAX_EP_FN Assignment assignment(int item) const { return {args_.expert_ids[item], args_.token_weights[item]}; }

  // Counts this rank's assignments by expert into the peers' mail.
  JAX_EP_FN void count() {
    op_.enter(Phase::count);
    if (histogram_.is_first() && op_.coop.lane == 0) *args_.dropped = 0;
    histogram_.count([&](int item) { return assignment(item); },
                     [&](int e, int total) {
                       if (e == args_.num_experts)
                         *args_.invalid = total;
                       else
                         for (int rank = 0; rank < op_.comm.size; ++rank) SentMail(op_).ints(rank)[e] = total;
                     });
  }

  // Derives the segments of every rank, and the first row of this rank's part in each.
  JAX_EP_FN void lay_out() {
    const Comm& comm = op_.comm;
    const ReceivedMail mail(op_);
    const auto count = [&](int source, int e) { return mail.ints(source)[e]; };
    const auto rows_before = [&](int rank, int e) {
      int rows = 0;
      for (int source = 0; source < rank; ++source) rows += count(source, e);
      return rows;
    };
    const auto keep_counts = [&](int e) {
      constexpr int kAhead = Histogram::kAhead;
      for (int first = 0; first < comm.size; first += kAhead) {
        int32_t counts[kAhead];
        for (int i = 0; i < kAhead; ++i) counts[i] = count(smaller(first + i, comm.size - 1), comm.rank * local_ + e);
        for (int i = 0; i < kAhead; ++i)
          if (first + i < comm.size) args_.counts[(first + i) * local_ + e] = counts[i];
      }
    };
    segments_.lay_out(
        histogram_.part(), [&](int e) { return rows_before(comm.size, e); },
        [&](int e) { return rows_before(comm.rank, e); }, keep_counts);
  }

  // Writes the targets of this coop's assignments, and every rank's row_of and weights for them. An assignment without
  // room has no row. If rows may not be dropped and some rank lacks room, no assignment has a row.
  JAX_EP_FN void place() {
    op_.enter(Phase::place);
    const bool fits = segments_.rank_without_room() < 0;
    const Divider by_local(local_);
    const int64_t mine = int64_t{op_.comm.rank} * args_.num_tokens * args_.top_k;
    int dropped = 0;
    const LaneWindow<int32_t> rows(op_, kWindow<&DispatchArgs::row_of>);
    const LaneWindow<float> weights(op_, kWindow<&DispatchArgs::weights>);
    histogram_.number([&](int item) { return assignment(item); }, first_rows(),
                      [&](int index, int bin, int row, float weight) {
                        Target target{-1, -1};
                        if (bin >= 0 && bin < args_.num_experts) {
                          const int owner = by_local.quotient(bin);
                          const int kept = fits ? row : segments_.row_kept(op_.comm.rank, owner, bin, row);
                          if (kept >= 0)
                            target = {owner, kept};
                          else
                            ++dropped;
                        }
                        if (index >= 0)
                          args_.targets[index] = target.row < 0 ? -1 : pack_target(target, args_.capacity);
                        for (int rank = 0; rank < op_.comm.size; ++rank) {
                          auto* const rows_there = rows.peer(rank);  // all lanes call
                          auto* const weights_there = weights.peer(rank);
                          if (index < 0) continue;
                          rows_there[mine + index] = rank == target.owner ? target.row : -1;
                          weights_there[mine + index] = rank == target.owner ? weight : 0.0f;
                        }
                      });
    add_up(dropped, args_.dropped);
  }
};

// For few tokens. Every rank sends its assignments to all ranks, and each rank computes the whole routing. Ranks
// exchange messages only once, while the tokens travel to landing slots.
class RoutingByAssignments : Routing {
 public:
  JAX_EP_FN RoutingByAssignments(Op& op, const DispatchArgs& args)
      : Routing(op, args, op.comm.size * args.num_tokens * args.top_k, 4 * kRoutingAssignments),
        per_rank_(args.num_tokens * args.top_k),
        by_rank_(per_rank_) {}

  // The other coops wait for the results only where they need them: see RoutingResults.
  JAX_EP_FN void run() {
    if (!histogram_.routes()) return;
    send_assignments();
    op_.wait(&SignalPad::mailed);
    const uint64_t issued = ask_posted();
    count();
    post_if_late(issued);
    op_.enter(Phase::layout);
    segments_.lay_out(
        histogram_.part(), [&](int e) { return segments_.totals()[e]; }, [](int) { return 0; }, [](int) {});
    histogram_.barrier();
    op_.signal_here(&op_.signal_pad->laid_out, histogram_.is_first());
    if (op_.ok()) place();
    histogram_.barrier();
    op_.signal_here(&op_.signal_pad->placed[op_.comm.rank], histogram_.is_first());
  }

 private:
  JAX_EP_FN void send_assignments() {
    const Coop& coop = op_.coop;
    if (!histogram_.is_first_cta()) return;
    op_.enter(Phase::count);
    constexpr int kAhead = Histogram::kAhead;
    const int step = coop.in_cta.count * Coop::lanes;
    for (int first = coop.in_cta.index * Coop::lanes + coop.lane; op_.ok() && first < per_rank_;
         first += kAhead * step) {
      Assignment assignments[kAhead];
      for (int i = 0; i < kAhead; ++i) {
        const int item = smaller(first + i * step, per_rank_ - 1);
        assignments[i] = {args_.expert_ids[item], args_.token_weights[item]};
      }
      for (int rank = 0; rank < op_.comm.size; ++rank) {
        int32_t* const experts = SentMail(op_).ints(rank);
        float* const weights = SentMail(op_).floats(rank);
        for (int i = 0; i < kAhead; ++i) {
          const int item = first + i * step;
          if (item >= per_rank_) continue;
          experts[item] = assignments[i].expert;
          weights[item] = assignments[i].weight;
        }
      }
    }
    coop.cta_sync();
    op_.signal(&SignalPad::mailed, histogram_.is_first());
  }

  // Assignment `item` of all ranks, in the order of the ranks.
  JAX_EP_FN Assignment assignment(int item) const {
    const int source = by_rank_.quotient(item), at = item - source * per_rank_;
    const ReceivedMail mail(op_);
    return {mail.ints(source)[at], mail.floats(source)[at]};
  }

  JAX_EP_FN void count() {
    op_.enter(Phase::count);
    const Coop& coop = op_.coop;
    for (int i = histogram_.part().index * Coop::lanes + coop.lane; i < op_.comm.size * local_;
         i += histogram_.part().count * Coop::lanes)
      args_.counts[i] = 0;
    if (histogram_.is_first() && coop.lane == 0) *args_.dropped = *args_.invalid = 0;
    histogram_.count([&](int item) { return assignment(item); },
                     [&](int e, int total) {
                       if (e < args_.num_experts) segments_.totals()[e] = total;
                     });
  }

  // Writes row_of and weights of this rank, and the targets of its own assignments. If rows may not be dropped and some
  // rank lacks room, no coop uses them (RoutingResults::all_placed).
  JAX_EP_FN void place() {
    op_.enter(Phase::place);
    const Divider by_local(local_);
    const bool fits = !args_.drop || segments_.rank_without_room() < 0;
    int dropped = 0, invalid = 0;
    histogram_.number([&](int item) { return assignment(item); }, first_rows(),
                      [&](int item, int bin, int number, float weight) {
                        if (item < 0) return;
                        const bool valid = bin >= 0 && bin < args_.num_experts;
                        const int owner = valid ? by_local.quotient(bin) : -1, source = by_rank_.quotient(item);
                        const int row = fits || !valid ? number : segments_.row_kept(source, owner, bin, number);
                        const bool placed = valid && row >= 0 && row < args_.capacity;
                        const bool is_local = placed && owner == op_.comm.rank;
                        args_.row_of[item] = is_local ? row : -1;
                        args_.weights[item] = is_local ? weight : 0.0f;
                        if (owner == op_.comm.rank)
                          atomic_add(&args_.counts[source * local_ + bin - owner * local_], 1);
                        if (source != op_.comm.rank) return;
                        args_.targets[item - source * per_rank_] =
                            placed ? pack_target({owner, row}, args_.capacity) : -1;
                        dropped += valid && !placed;
                        invalid += bin == args_.num_experts;
                      });
    add_up(dropped, args_.dropped);
    add_up(invalid, args_.invalid);
  }

  const int per_rank_;
  const Divider by_rank_;
};

}  // namespace jax_ep
