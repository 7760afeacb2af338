// scatter: rows along a routing that is already known, as combine's backward pass needs it.
#pragma once

#include "kernels/moe/args.h"
#include "kernels/moe/bound.h"
#include "kernels/moe/rows.h"
#include "kernels/results.h"

namespace jax_ep {

// RowCounts that the user hands back.
struct BoundedCounts {
  const int32_t* counts;  // [sources, local_experts]
  int sources, local_experts;
  Bound* bound;
  int end = -1;

  JAX_EP_FN int operator()(int expert) const {
    int rows = 0;
    for (int source = 0; source < sources; ++source) rows += bound->count(counts[source * local_experts + expert]);
    return rows;
  }
};

template <class T>
JAX_EP_FN void run_kernel(const Comm& comm, const ScatterArgs& args, const Team& team) {
  Op op(comm, team, OpKind::scatter);
  const int64_t bytes = int64_t{args.hidden} * sizeof(T);
  const Results<ScatterArgs> results(args, comm.size);
  op.poison(results);
  op.post(args.received);
  op.wait_posted();
  RowMover mover(team);
  const RowSink sink(op, args.targets, args.top_k, args.capacity);
  Bound targets(RoutingLeaf::targets, comm.size * args.capacity), rows(RoutingLeaf::rows, args.capacity);
  if (op.ok() && team.pusher.index >= 0)
    push_chunks(
        op, mover, PushItems(op, args.num_tokens, args.num_tokens <= kFewTokens), args.num_tokens, bytes, args.top_k,
        [&](int token) { return args.tokens + token * bytes; },
        [&](int token, int k) { return sink.row(token, k, bytes, targets.place(sink.packed(token, k))); },
        [&] { targets.report_to_all(op); });
  Bound counts(RoutingLeaf::counts, args.num_tokens * args.top_k + 1);  // of the assignments of a rank
  const BoundedCounts bounded{args.counts, comm.size, args.local_experts, &counts};
  zero_padding(op, args.received, bytes, bounded, args.capacity, args.alignment);
  for_each_arrival(op, args.num_tokens, /*own=*/false, [&](int source, Range tokens) {
    const int32_t* table = args.rows + int64_t{source} * args.num_tokens * args.top_k;
    const int here = copy_to_rows(
        op.team, mover, {tokens.begin, tokens.end, 1}, args.received, bytes, table, args.top_k,
        [&](int, int row) { return args.received + row * bytes; }, [&](int row) { return rows.place(row); });
    if (team.lane == 0) op.count_received(source, here * bytes);
  });
  mover.complete_to(mover.mark());
  rows.report(op);
  counts.report(op);
  op.finish(results);
}

}  // namespace jax_ep
