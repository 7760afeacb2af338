// Moving rows along a routing: each token once per rank, its further rows there by the receiver.
#pragma once

#include "device/copy.h"
#include "kernels/op.h"

namespace jax_ep {

// Calls visit(k, target, first) for the assignments of one token that have a row; `first` is the first at its owner.
template <class Visit>
JAX_EP_FN void for_each_target(const int32_t* targets, int top_k, int capacity, Visit visit) {
  for (int k = 0; k < top_k; ++k) {
    if (targets[k] < 0) continue;
    const Target target = unpack_target(targets[k], capacity);
    bool first = true;
    for (int j = 0; j < k; ++j)
      if (targets[j] >= 0 && targets[j] / capacity == target.owner) first = false;
    visit(k, target, first);
  }
}

// Writes a token to its first row at every owner, and to all of its rows on this rank.
JAX_EP_FN void push_row(Op& op, const char* row, int64_t bytes, const int32_t* targets, int top_k, int capacity) {
  for_each_target(targets, top_k, capacity, [&](int, Target target, bool first) {
    if (!first && target.owner != op.comm.rank) return;
    char* received = static_cast<char*>(op.mail_from(target.owner)->buffers[0]);
    copy_row(op.team, received + target.row * bytes, row, bytes);
  });
}

// Copies what peers wrote into a token's first row to its further rows, for every token of every peer.
JAX_EP_FN void expand_rows(Op& op, char* received, int64_t bytes, const int32_t* rows, int num_tokens, int top_k) {
  const int total = op.comm.size * num_tokens;
  for (int i = op.team.index; op.ok() && i < total; i += op.team.count) {
    if (i / num_tokens == op.comm.rank) continue;
    const int32_t* of_token = rows + int64_t{i} * top_k;
    int first = -1;
    for (int k = 0; k < top_k; ++k) {
      if (of_token[k] < 0) continue;
      if (first < 0)
        first = of_token[k];
      else
        copy_row(op.team, received + of_token[k] * bytes, received + first * bytes, bytes);
    }
  }
}

// Zeroes what holds no token: the padding of every segment, and all behind the last.
JAX_EP_FN void zero_padding(Op& op, char* received, int64_t bytes, const int32_t* counts, int local_experts,
                            int capacity, int alignment) {
  const Team& team = op.team;
  const auto zero = [&](int begin, int end, int first, int step) {
    for (int row = begin + first; row < smaller(end, capacity); row += step)
      fill_row(team, received + row * bytes, 0, bytes);
  };
  int start = 0;
  for (int expert = 0; expert < local_experts; ++expert) {
    int rows = 0;
    for (int source = 0; source < op.comm.size; ++source) rows += counts[source * local_experts + expert];
    const int padded = align_up(rows, alignment);
    if (expert % team.count == team.index) zero(start + rows, start + padded, 0, 1);
    start += padded;
  }
  zero(start, capacity, team.index, team.count);
}

}  // namespace jax_ep
