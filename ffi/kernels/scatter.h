// scatter: rows along a routing that is already known, as combine's backward pass needs it.
#pragma once

#include "kernels/args.h"
#include "kernels/rows.h"

namespace jax_ep {

template <class T>
JAX_EP_FN void run_kernel(const Comm& comm, const ScatterArgs& args, const Team& team) {
  Op op(comm, team, OpKind::scatter);
  const int64_t bytes = int64_t{args.hidden} * sizeof(T);
  const Buffer results[] = {{args.received, args.capacity * bytes}};
  op.poison(results);
  op.post(args.received);
  op.wait_posted();
  RowMover mover(team);
  const RowSink sink(op, args.targets, args.top_k, args.capacity);
  if (op.ok() && team.pusher.index >= 0)
    push_chunks(
        op, mover, PushItems(op, args.num_tokens), args.num_tokens, bytes, args.top_k,
        [&](int token) { return args.tokens + token * bytes; },
        [&](int token, int k) { return sink.row(token, k, bytes); });
  zero_padding(op, args.received, bytes, {args.counts, comm.size, args.local_experts, -1}, args.capacity,
               args.alignment);
  for_each_arrival(op, args.num_tokens, /*own=*/false, [&](int source, Range tokens) {
    const int32_t* table = args.rows + int64_t{source} * args.num_tokens * args.top_k;
    copy_to_rows(op.team, mover, {tokens.begin, tokens.end, 1}, args.received, bytes, table, args.top_k,
                 [&](int, int row) { return args.received + row * bytes; });
  });
  mover.complete_to(mover.mark());
  op.finish(results);
}

}  // namespace jax_ep
