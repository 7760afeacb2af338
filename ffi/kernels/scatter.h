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
  const Range mine = share(args.num_tokens, team.index, team.count);
  for (int token = mine.begin; token < mine.end && op.may_push(); ++token)
    push_row(op, args.tokens + token * bytes, bytes, args.targets + int64_t{token} * args.top_k, args.top_k,
             args.capacity);
  if (op.ok()) zero_padding(op, args.received, bytes, args.counts, args.local_experts, args.capacity, args.alignment);
  op.deliver();
  op.wait_delivered();
  expand_rows(op, args.received, bytes, args.rows, args.num_tokens, args.top_k);
  op.finish(results);
}

}  // namespace jax_ep
