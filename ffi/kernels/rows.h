// Moving rows along a routing: each token once per rank, its further rows there by the receiver.
#pragma once

#include "device/mover.h"
#include "kernels/op.h"
#include "kernels/schedule.h"

namespace jax_ep {

// Calls visit(target, first) for the assignments of one token that have a row; `first` is the first at its owner.
template <class Visit>
JAX_EP_FN void for_each_target(const int32_t* targets, int top_k, int capacity, Visit visit) {
  for (int k = 0; k < top_k; ++k) {
    if (targets[k] < 0) continue;
    const Target target = unpack_target(targets[k], capacity);
    bool first = true;
    for (int j = 0; j < k; ++j)
      if (targets[j] >= 0 && targets[j] / capacity == target.owner) first = false;
    visit(target, first);
  }
}

// Pushes this team's tokens in order and announces every chunk once it is written: when the first row of the next
// chunk is already on its way, so that the wire does not run dry. source_of(token) is what sinks(token, put) places.
template <class SourceOf, class Sinks>
JAX_EP_FN void push_chunks(Op& op, RowMover& mover, int num_tokens, int64_t bytes, SourceOf source_of, Sinks sinks) {
  const Place pusher = op.team.pusher;
  if (!op.ok() || pusher.index < 0) return;
  const Schedule schedule(num_tokens);
  int announced = 0;
  const auto source = [&](int token) -> const char* { return op.may_push() ? source_of(token) : nullptr; };
  const auto after = [&](int token, RowMover& rows) {
    const int chunk = token / schedule.chunk_tokens;
    if (chunk == announced) return;
    rows.complete(1);
    for (; announced < chunk; ++announced) op.deliver(announced);
  };
  mover.move(Stride{pusher.index, num_tokens, pusher.count}, bytes, source, sinks, after);
  mover.complete(0);
  announced = op.team.broadcast(announced);
  for (; announced < schedule.chunks; ++announced) op.deliver(announced);
}

// Places a token in its first row at every owner, and in all of its rows on this rank.
template <class Put>
JAX_EP_FN void put_token(const Op& op, int64_t bytes, const int32_t* targets, int top_k, int capacity, Put put) {
  for_each_target(targets, top_k, capacity, [&](Target target, bool first) {
    if (!first && target.owner != op.comm.rank) return;
    put(static_cast<char*>(op.mail_from(target.owner)->buffers[0]) + target.row * bytes);
  });
}

// Takes groups of tokens in the order in which they arrive, until none are left: visit(source, tokens) once they are
// here. Every chunk of every source but this rank, or of all sources, is waited for by somebody.
template <class Visit>
JAX_EP_FN void for_each_arrival(Op& op, int num_tokens, bool own, Visit visit) {
  const Schedule schedule(num_tokens);
  const int sources = op.comm.size - (own ? 0 : 1), per_chunk = sources * schedule.groups();
  while (op.ok()) {
    const int ticket = op.take_ticket();
    if (ticket >= schedule.chunks * per_chunk) return;
    const int chunk = ticket / per_chunk, group = ticket % per_chunk / sources;
    const int source = (op.comm.rank + 1 + ticket % sources) % op.comm.size;
    op.wait_delivered(source, chunk);
    if (op.ok()) visit(source, schedule.group(chunk, group));
  }
}

// The first row of a token in a table of rows, and whether it has further ones.
struct FirstRow {
  int row;
  bool more;
};
JAX_EP_FN FirstRow first_row(const int32_t* rows, int top_k) {
  FirstRow found{-1, false};
  for (int k = 0; k < top_k; ++k) {
    if (rows[k] < 0) continue;
    if (found.row >= 0) {
      found.more = true;
      break;
    }
    found.row = rows[k];
  }
  return found;
}

// Copies what peers wrote into a token's first row to its further rows.
JAX_EP_FN void expand_rows(Op& op, RowMover& mover, char* received, int64_t bytes, const int32_t* rows, int num_tokens,
                           int top_k) {
  for_each_arrival(op, num_tokens, /*own=*/false, [&](int source_rank, Range tokens) {
    const int32_t* table = rows + int64_t{source_rank} * num_tokens * top_k;
    const auto source = [&](int token) -> const char* {
      const FirstRow first = first_row(table + int64_t{token} * top_k, top_k);
      return first.more ? received + first.row * bytes : nullptr;
    };
    const auto sinks = [&](int token, auto put) {
      const int32_t* of_token = table + int64_t{token} * top_k;
      const int first = first_row(of_token, top_k).row;
      for (int k = 0; k < top_k; ++k)
        if (of_token[k] >= 0 && of_token[k] != first) put(received + of_token[k] * bytes);
    };
    mover.move(Stride{tokens.begin, tokens.end, 1}, bytes, source, sinks, [](int, RowMover&) {});
  });
  mover.complete(0);
}

// Zeroes what holds no token: the padding of every segment, and all behind the last.
JAX_EP_FN void zero_padding(Op& op, char* received, int64_t bytes, const int32_t* counts, int local_experts,
                            int capacity, int alignment) {
  const Team& team = op.team;
  const Place filler = team.filler;
  if (!op.ok() || filler.index < 0) return;
  const auto zero = [&](int begin, int end, int first, int step) {
    for (int row = begin + first; row < smaller(end, capacity); row += step)
      fill_row(team, received + row * bytes, 0, bytes);
  };
  int start = 0;
  for (int expert = 0; expert < local_experts; ++expert) {
    int rows = 0;
    for (int source = 0; source < op.comm.size; ++source) rows += counts[source * local_experts + expert];
    const int padded = align_up(rows, alignment);
    if (expert % filler.count == filler.index) zero(start + rows, start + padded, 0, 1);
    start += padded;
  }
  zero(start, capacity, filler.index, filler.count);
}

}  // namespace jax_ep
