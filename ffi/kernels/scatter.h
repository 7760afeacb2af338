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
  push_chunks(
      op, mover, args.num_tokens, bytes, args.top_k, [&](int token) { return args.tokens + token * bytes; },
      [&](int token, int k) { return sink.row(token, k, bytes); });
  zero_padding(op, args.received, bytes, args.counts, args.local_experts, args.capacity, args.alignment);
  expand_rows(op, mover, args.received, bytes, args.rows, args.num_tokens, args.top_k);
  op.finish(results);
}

}  // namespace jax_ep
