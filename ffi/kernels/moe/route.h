// Routing: every rank counts its assignments per expert, exchanges the counts, and derives the row of each of its
// assignments, while the first tokens are on their way. Rows are ordered by (expert, source rank, token, k), whatever
// the number of coops.
#pragma once

#include "comm/op.h"
#include "comm/push.h"
#include "kernels/moe/args.h"
#include "kernels/moe/routed.h"
#include "kernels/moe/rows.h"
#include "kernels/moe/segments.h"
#include "kernels/moe/tally.h"

namespace jax_ep {

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
    route([](Part) {});
  }
  // What prepare(part) of every router did is seen by whoever sees that the rows are laid out.
  template <class Prepare>
  JAX_EP_FN void route(Prepare prepare) {
    if (!tally_.takes_part()) return;
    count();
    op_.tell(&Heap::chosen, tally_.is_first());
    op_.wait_told(&Heap::chosen);
    const LatePost posted(op_, tally_.is_responsible());
    op_.enter(Phase::layout);
    lay_out();
    prepare(tally_.part());
    posted.post_if_late(op_, args_);
    tally_.barrier();
    op_.note(&op_.heap->laid_out, tally_.is_first());
    op_.wait_posted();
    if (op_.ok()) place();
    tally_.barrier();
    op_.tell(&Heap::placed, tally_.is_first());
  }

 private:
  JAX_EP_FN Choice choice(int item) const { return {args_.expert_ids[item], args_.weights[item]}; }

  // After it the peers have this rank's counts.
  JAX_EP_FN void count() {
    op_.enter(Phase::count);
    if (tally_.is_first() && op_.coop.lane == 0) *args_.dropped = 0;
    tally_.count([&](int item) { return choice(item); },
                 [&](int e, int total) {
                   if (e == args_.num_experts)
                     *args_.invalid = total;
                   else
                     for (int peer = 0; peer < op_.comm.size; ++peer) op_.mail(peer, op_.comm.rank)->counts[e] = total;
                 });
  }

  // From all ranks' counts: the segments of every rank, and in them the first row of this rank's share.
  JAX_EP_FN void lay_out() {
    const Comm& comm = op_.comm;
    const auto count = [&](int source, int e) { return op_.mail_from(source)->counts[e]; };
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
    const LaneWindow<int32_t> rows(op_, kWindow<&DispatchArgs::rows>);
    const LaneWindow<float> weights(op_, kWindow<&DispatchArgs::arrived>);
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

}  // namespace jax_ep
