// Routing: which row each assignment of a dispatch gets, worked out by some coops, and what the others learn of it; how
// peers learn where its buffers are. Rows are ordered by (expert, source rank, token, k), whatever the number of coops.
#pragma once

#include "comm/op.h"
#include "comm/push.h"
#include "comm/window.h"
#include "kernels/moe/args.h"
#include "kernels/moe/segments.h"
#include "kernels/moe/tally.h"

namespace jax_ep {

// What the coops of a rank learn of the routing, which some of them work out.
class Routed {
 public:
  JAX_EP_FN Routed(Op& op, const DispatchArgs& args) : op_(op), args_(args), segments_(op, args) {}

  // Waits until the rows of the local experts are counted, and returns the counts.
  JAX_EP_FN RowCounts counts() const {
    op_.wait_here(&op_.heap->laid_out);
    return segments_.counts();
  }

  // Waits until this rank's assignments have their rows.
  JAX_EP_FN void await_placed() const { op_.wait_here(&op_.heap->placed[op_.comm.rank]); }

  // Waits until the assignments of all ranks have their rows, and returns whether there is room for them. If tokens are
  // few, each rank places all.
  JAX_EP_FN bool settled() const {
    await_placed();
    if (!args_.few) op_.wait(&Heap::placed);
    return op_.ok() && segments_.check_capacity();
  }

 private:
  Op& op_;
  const DispatchArgs& args_;
  const Segments segments_;
};

// Hands out the tokens of a dispatch, one that is not eager only when it has its rows; none once the op has failed.
class RoutedTokens {
 public:
  JAX_EP_FN RoutedTokens(Op& op, const DispatchArgs& args, const Routed& routed)
      : op_(op), routed_(routed), eager_(args.eager), items_(op, args.num_tokens) {}

  JAX_EP_FN int next() {
    const int token = items_.next();
    if (token >= eager_ && !placed_) {
      routed_.await_placed();
      op_.enter(Phase::send);
      placed_ = true;
    }
    return op_.ok() ? token : -1;
  }
  JAX_EP_FN int next_abandoned() const { return -1; }  // all go by ticket

 private:
  Op& op_;
  const Routed& routed_;
  const int eager_;
  PushItems items_;
  bool placed_ = false;
};

// Who tells the peers where the buffers of a dispatch are: the last coop of the last CTA, so that nobody waits who
// routes; or one of the routers, if that CTA finds no SM while other kernels run. To post twice does no harm.
JAX_EP_FN void post_buffers(Op& op, const DispatchArgs& args, bool poster) {
  op.post_by(poster, posted(args, op.comm.size));
}

// All coops call, before they route.
JAX_EP_FN void post_dispatch(Op& op, const DispatchArgs& args) {
  op.record_begin(op.is_recorder());
  post_buffers(op, args, op.coop.index == (Coop::lanes == 1 ? 0 : op.coop.count - 1));
}

// For the routers: made when they have heard what the peers chose, and asked to post when they have counted that. By
// then it is known whether the last CTA has posted.
class LatePost {
 public:
  // One coop of the rank is `responsible`. A thread of the CPU has posted itself.
  JAX_EP_FN LatePost(const Op& op, bool responsible)
      : asked_(Coop::lanes > 1 && responsible ? op.ask_posted() : ~uint64_t{0}) {}

  JAX_EP_FN void post_if_late(Op& op, const DispatchArgs& args) const { post_buffers(op, args, op.is_earlier(asked_)); }

 private:
  const uint64_t asked_;
};

// Every rank counts its assignments per expert, exchanges the counts, and derives the row of each of its assignments,
// while the first tokens are on their way.
class Router {
 public:
  JAX_EP_FN Router(Op& op, const DispatchArgs& args)
      : op_(op),
        args_(args),
        tally_(op, args, args.num_tokens * args.top_k, kRouterAssignments),
        segments_(op, args),
        local_(args.num_experts / op.comm.size) {}

  // Other coops do not wait for it before they need what it finds: see Routed.
  JAX_EP_FN void route() {
    if (!tally_.routes()) return;
    count();
    op_.signal(&Heap::chosen, tally_.is_first());
    op_.wait(&Heap::chosen);
    const LatePost posted(op_, tally_.is_responsible());
    op_.enter(Phase::layout);
    lay_out();
    posted.post_if_late(op_, args_);
    tally_.barrier();
    op_.signal_here(&op_.heap->laid_out, tally_.is_first());
    op_.wait_posted();
    if (op_.ok()) place();
    tally_.barrier();
    op_.signal(&Heap::placed, tally_.is_first());
  }

 private:
  JAX_EP_FN Choice choice(int item) const { return {args_.expert_ids[item], args_.token_weights[item]}; }

  // After it the peers have this rank's counts.
  JAX_EP_FN void count() {
    op_.enter(Phase::count);
    if (tally_.is_first() && op_.coop.lane == 0) *args_.dropped = 0;
    tally_.count([&](int item) { return choice(item); },
                 [&](int e, int total) {
                   if (e == args_.num_experts)
                     *args_.invalid = total;
                   else
                     for (int peer = 0; peer < op_.comm.size; ++peer) SentMail(op_).counts(peer)[e] = total;
                 });
  }

  // From all ranks' counts: the segments of every rank, and in them the first row of this rank's share.
  JAX_EP_FN void lay_out() {
    const Comm& comm = op_.comm;
    const ReceivedMail mail(op_);
    const auto count = [&](int source, int e) { return mail.counts(source)[e]; };
    const auto rows_before = [&](int rank, int e) {
      int rows = 0;
      for (int source = 0; source < rank; ++source) rows += count(source, e);
      return rows;
    };
    const auto keep_counts = [&](int e) {
      constexpr int kAhead = Tally::kAhead;
      for (int first = 0; first < comm.size; first += kAhead) {
        int32_t counts[kAhead];
        for (int i = 0; i < kAhead; ++i) counts[i] = count(smaller(first + i, comm.size - 1), comm.rank * local_ + e);
        for (int i = 0; i < kAhead; ++i)
          if (first + i < comm.size) args_.counts[(first + i) * local_ + e] = counts[i];
      }
    };
    segments_.lay_out(
        tally_.part(), [&](int e) { return rows_before(comm.size, e); },
        [&](int e) { return rows_before(comm.rank, e); }, keep_counts);
  }

  // Writes the targets of this coop's assignments, and tells every rank which of its rows hold them: those that find
  // room, or, where none may be dropped, none if some rank has no room.
  JAX_EP_FN void place() {
    op_.enter(Phase::place);
    const bool fits = segments_.rank_without_room() < 0;
    const Divider by_local(local_);
    const int64_t mine = int64_t{op_.comm.rank} * args_.num_tokens * args_.top_k;
    int dropped = 0;
    const LaneWindow<int32_t> rows(op_, kWindow<&DispatchArgs::row_of>);
    const LaneWindow<float> weights(op_, kWindow<&DispatchArgs::weights>);
    const auto first_row = [&](int e) { return segments_.first_row(e); };
    tally_.number([&](int item) { return choice(item); }, first_row,
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
                    if (index >= 0) args_.targets[index] = target.row < 0 ? -1 : pack_target(target, args_.capacity);
                    for (int rank = 0; rank < op_.comm.size; ++rank) {
                      auto* rows_there = rows.peer(rank) + mine + index;
                      auto* weights_there = weights.peer(rank) + mine + index;
                      if (index < 0) continue;
                      *rows_there = rank == target.owner ? target.row : -1;
                      *weights_there = rank == target.owner ? weight : 0.0f;
                    }
                  });
    dropped = op_.coop.sum(dropped);
    if (op_.coop.lane == 0 && dropped) atomic_add(args_.dropped, dropped);
  }

  Op& op_;
  const DispatchArgs& args_;
  Tally tally_;
  const Segments segments_;
  const int local_;
};

// For few tokens: every rank tells all which experts its tokens chose, and works out alone where everything goes. So
// ranks talk once, before any row is on its way; the rows set off while it is worked out, to where they land by source
// and token.
class FewRouter {
 public:
  JAX_EP_FN FewRouter(Op& op, const DispatchArgs& args)
      : op_(op),
        args_(args),
        tally_(op, args, op.comm.size * args.num_tokens * args.top_k, 4 * kRouterAssignments),
        segments_(op, args),
        local_(args.num_experts / op.comm.size),
        per_rank_(args.num_tokens * args.top_k),
        by_rank_(per_rank_) {}

  // Other coops do not wait for it before they need what it finds: see Routed.
  JAX_EP_FN void route() {
    if (!tally_.routes()) return;
    send_choices();
    op_.wait(&Heap::chosen);
    const LatePost posted(op_, tally_.is_responsible());
    count();
    posted.post_if_late(op_, args_);
    op_.enter(Phase::layout);
    segments_.lay_out(tally_.part(), [&](int e) { return segments_.totals()[e]; }, [](int) { return 0; }, [](int) {});
    tally_.barrier();
    op_.signal_here(&op_.heap->laid_out, tally_.is_first());
    if (op_.ok()) place();
    tally_.barrier();
    op_.signal_here(&op_.heap->placed[op_.comm.rank], tally_.is_first());
  }

 private:
  JAX_EP_FN void send_choices() {
    const Coop& coop = op_.coop;
    if (!tally_.is_first_cta()) return;
    op_.enter(Phase::count);
    constexpr int kAhead = Tally::kAhead;
    const int step = coop.member.count * Coop::lanes;
    for (int first = coop.member.index * Coop::lanes + coop.lane; op_.ok() && first < per_rank_;
         first += kAhead * step) {
      Choice choices[kAhead];
      for (int i = 0; i < kAhead; ++i) {
        const int item = smaller(first + i * step, per_rank_ - 1);
        choices[i] = {args_.expert_ids[item], args_.token_weights[item]};
      }
      for (int peer = 0; peer < op_.comm.size; ++peer) {
        int32_t* const experts = SentMail(op_).counts(peer);
        float* const weights = SentMail(op_).weights(peer);
        for (int i = 0; i < kAhead; ++i) {
          const int item = first + i * step;
          if (item >= per_rank_) continue;
          experts[item] = choices[i].expert;
          weights[item] = choices[i].weight;
        }
      }
    }
    coop.cta_sync();
    op_.signal(&Heap::chosen, tally_.is_first());
  }

  // An item of all ranks' assignments in order.
  JAX_EP_FN Choice choice(int item) const {
    const int source = by_rank_.quotient(item), at = item - source * per_rank_;
    const ReceivedMail mail(op_);
    return {mail.counts(source)[at], mail.weights(source)[at]};
  }

  JAX_EP_FN void count() {
    op_.enter(Phase::count);
    const Coop& coop = op_.coop;
    for (int i = tally_.part().index * Coop::lanes + coop.lane; i < op_.comm.size * local_;
         i += tally_.part().count * Coop::lanes)
      args_.counts[i] = 0;
    if (tally_.is_first() && coop.lane == 0) *args_.dropped = *args_.invalid = 0;
    tally_.count([&](int item) { return choice(item); },
                 [&](int e, int total) {
                   if (e < args_.num_experts) segments_.totals()[e] = total;
                 });
  }

  // Writes which rows here hold what, and the targets of this rank's own assignments.
  JAX_EP_FN void place() {
    op_.enter(Phase::place);
    const Divider by_local(local_);
    const bool fits = !args_.drop || segments_.rank_without_room() < 0;
    int dropped = 0, invalid = 0;
    const auto first_row = [&](int e) { return segments_.first_row(e); };
    tally_.number([&](int item) { return choice(item); }, first_row,
                  [&](int item, int bin, int number, float weight) {
                    if (item < 0) return;
                    const bool valid = bin >= 0 && bin < args_.num_experts;
                    const int owner = valid ? by_local.quotient(bin) : -1, source = by_rank_.quotient(item);
                    const int row = fits || !valid ? number : segments_.row_kept(source, owner, bin, number);
                    const bool placed = valid && row >= 0 && row < args_.capacity;
                    const bool here = placed && owner == op_.comm.rank;
                    args_.row_of[item] = here ? row : -1;
                    args_.weights[item] = here ? weight : 0.0f;
                    if (owner == op_.comm.rank) atomic_add(&args_.counts[source * local_ + bin - owner * local_], 1);
                    if (source != op_.comm.rank) return;
                    args_.targets[item - source * per_rank_] = placed ? pack_target({owner, row}, args_.capacity) : -1;
                    dropped += valid && !placed;
                    invalid += bin == args_.num_experts;
                  });
    dropped = op_.coop.sum(dropped);
    invalid = op_.coop.sum(invalid);
    if (op_.coop.lane == 0 && dropped) atomic_add(args_.dropped, dropped);
    if (op_.coop.lane == 0 && invalid) atomic_add(args_.invalid, invalid);
  }

  Op& op_;
  const DispatchArgs& args_;
  Tally tally_;
  const Segments segments_;
  const int local_, per_rank_;
  const Divider by_rank_;
};

}  // namespace jax_ep
