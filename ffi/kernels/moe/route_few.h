// Routing of few tokens: every rank tells all which experts its tokens chose, and works out alone where everything
// goes. So ranks talk once, before any row is on its way; the rows set off while it is worked out, to where they land
// by source and token. The order of rows is that of route.h.
#pragma once

#include "comm/op.h"
#include "kernels/moe/args.h"
#include "kernels/moe/routed.h"
#include "kernels/moe/rows.h"
#include "kernels/moe/segments.h"
#include "kernels/moe/tally.h"

namespace jax_ep {

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
    if (!tally_.takes_part()) return;
    send_choices();
    op_.wait_told(&Heap::chosen);
    const LatePost posted(op_, tally_.is_responsible());
    count();
    posted.post_if_late(op_, args_);
    op_.enter(Phase::layout);
    segments_.lay_out(tally_.part(), [&](int e) { return segments_.totals()[e]; }, [](int) { return 0; }, [](int) {});
    tally_.barrier();
    op_.note(&op_.heap->laid_out, tally_.is_first());
    if (op_.ok()) place();
    tally_.barrier();
    op_.note(&op_.heap->placed[op_.comm.rank], tally_.is_first());
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
        choices[i] = {args_.expert_ids[item], args_.weights[item]};
      }
      for (int peer = 0; peer < op_.comm.size; ++peer) {
        Mail* box = op_.mail(peer, op_.comm.rank);
        for (int i = 0; i < kAhead; ++i) {
          const int item = first + i * step;
          if (item >= per_rank_) continue;
          box->counts[item] = choices[i].expert;
          box->weights[item] = choices[i].weight;
        }
      }
    }
    coop.cta_sync();
    op_.tell(&Heap::chosen, tally_.is_first());
  }

  // An item of all ranks' assignments in order.
  JAX_EP_FN Choice choice(int item) const {
    const int source = by_rank_.quotient(item), at = item - source * per_rank_;
    const Mail* box = op_.mail_from(source);
    return {box->counts[at], box->weights[at]};
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
                    args_.rows[item] = here ? row : -1;
                    args_.arrived[item] = here ? weight : 0.0f;
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
