// dispatch: route, then every token straight into XLA's buffer at the ranks that own its experts.
#pragma once

#include "kernels/route.h"
#include "kernels/rows.h"
#include "kernels/wire.h"

namespace jax_ep {

// Where a token in float8 lands at every owner.
JAX_EP_FN int64_t landing_slot(int source, int token, const DispatchArgs& args) {
  return (int64_t{source} * args.num_tokens + token) * wire_bytes(args.hidden);
}

// Fills every rank's tables for one token: which of its rows there hold it, and with which weights.
JAX_EP_FN void push_tables(Op& op, const DispatchArgs& args, int token) {
  const int32_t* targets = args.targets + int64_t{token} * args.top_k;
  const int64_t at = (int64_t{op.comm.rank} * args.num_tokens + token) * args.top_k;
  for (int i = op.team.lane; i < op.comm.size * args.top_k; i += Team::lanes) {
    const int rank = i / args.top_k, k = i % args.top_k;
    const Target target = unpack_target(targets[k] < 0 ? 0 : targets[k], args.capacity);
    const bool here = targets[k] >= 0 && target.owner == rank;
    const Mail* box = op.mail_from(rank);
    static_cast<int32_t*>(box->buffers[1])[at + k] = here ? target.row : -1;
    static_cast<float*>(box->buffers[2])[at + k] = here ? args.weights[int64_t{token} * args.top_k + k] : 0.0f;
  }
}

// What this team placed, it tells the owners; and in float8, it encodes, each token in this rank's own landing slot.
template <class T>
JAX_EP_FN void announce_tokens(Op& op, const DispatchArgs& args) {
  const Range mine = share(args.num_tokens, op.team.index, op.team.count);
  for (int token = mine.begin; token < mine.end && op.may_push(); ++token) {
    push_tables(op, args, token);
    if (!args.wire_float8) continue;
    const auto* row = reinterpret_cast<const T*>(args.tokens) + int64_t{token} * args.hidden;
    encode_row(op.team, row, args.hidden, args.landing + landing_slot(op.comm.rank, token, args));
  }
  op.barrier();
}

template <class T>
JAX_EP_FN void push_tokens(Op& op, RowMover& mover, const DispatchArgs& args) {
  const int64_t bytes = int64_t{args.hidden} * sizeof(T);
  const auto source = [&](int token) { return args.tokens + token * bytes; };
  const auto sinks = [&](int token, auto put) {
    put_token(op, bytes, args.targets + int64_t{token} * args.top_k, args.top_k, args.capacity, put);
  };
  push_chunks(op, mover, args.num_tokens, bytes, source, sinks);
}

// Copies every encoded token to its slot at every owner.
JAX_EP_FN void push_encoded(Op& op, RowMover& mover, const DispatchArgs& args) {
  const auto source = [&](int token) { return args.landing + landing_slot(op.comm.rank, token, args); };
  const auto sinks = [&](int token, auto put) {
    const int32_t* targets = args.targets + int64_t{token} * args.top_k;
    for_each_target(targets, args.top_k, args.capacity, [&](Target target, bool first) {
      if (!first || target.owner == op.comm.rank) return;
      put(static_cast<char*>(op.mail_from(target.owner)->buffers[0]) + landing_slot(op.comm.rank, token, args));
    });
  };
  push_chunks(op, mover, args.num_tokens, wire_bytes(args.hidden), source, sinks);
}

// Decodes what landed into the first row of every token, and copies it to the further ones.
template <class T>
JAX_EP_FN void expand_encoded(Op& op, const DispatchArgs& args) {
  T* received = reinterpret_cast<T*>(args.received);
  for_each_arrival(op, args.num_tokens, /*own=*/true, [&](int source, Range tokens) {
    for (int token = tokens.begin; token < tokens.end; ++token) {
      const int32_t* rows = args.rows + (int64_t{source} * args.num_tokens + token) * args.top_k;
      const T* decoded = nullptr;
      for (int k = 0; k < args.top_k; ++k) {
        if (rows[k] < 0) continue;
        T* row = received + int64_t{rows[k]} * args.hidden;
        if (decoded)
          copy_row(op.team, reinterpret_cast<char*>(row), reinterpret_cast<const char*>(decoded),
                   int64_t{args.hidden} * sizeof(T));
        else
          decode_row(op.team, args.landing + landing_slot(source, token, args), args.hidden, row);
        decoded = row;
      }
    }
  });
}

JAX_EP_FN void sum_dropped(Op& op, const DispatchArgs& args, const RouteScratch& scratch) {
  if (!op.ok() || op.team.index != 0) return;
  int dropped = 0;
  for (int i = op.team.lane; i < op.team.count; i += Team::lanes) dropped += scratch.dropped(i);
  dropped = op.team.sum(dropped);
  if (op.team.lane == 0) *args.dropped = dropped;
}

template <class T>
JAX_EP_FN void run_kernel(const Comm& comm, const DispatchArgs& args, const Team& team) {
  Op op(comm, team, OpKind::dispatch);
  const int64_t local = args.num_experts / comm.size, row = int64_t{args.hidden} * sizeof(T);
  const int64_t table = int64_t{comm.size} * args.num_tokens * args.top_k * 4;
  const Buffer results[] = {{args.received, args.capacity * row},
                            {args.group_sizes, local * 4, true},
                            {args.targets, int64_t{args.num_tokens} * args.top_k * 4},
                            {args.rows, table},
                            {args.arrived, table},
                            {args.counts, comm.size * local * 4, true},
                            {args.dropped, 4, true},
                            {args.invalid, 4, true}};
  op.poison(results);
  const RouteScratch scratch{args.scratch, args.num_experts};
  const bool fits = route(op, args, scratch, args.wire_float8 ? args.landing : args.received);
  if (fits) {
    announce_tokens<T>(op, args);
    sum_dropped(op, args, scratch);
    RowMover mover(team);
    if (args.wire_float8)
      push_encoded(op, mover, args);
    else
      push_tokens<T>(op, mover, args);
    zero_padding(op, args.received, row, args.counts, static_cast<int>(local), args.capacity, args.alignment);
    if (args.wire_float8)
      expand_encoded<T>(op, args);
    else
      expand_rows(op, mover, args.received, row, args.rows, args.num_tokens, args.top_k);
  }
  op.finish(results, !fits);
}

}  // namespace jax_ep
