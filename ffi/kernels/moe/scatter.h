// scatter: sends rows along a known routing, for combine's backward pass, dispatch's tangent and dispatch across nodes.
#pragma once

#include <variant>

#include "comm/op.h"
#include "comm/push.h"
#include "kernels/moe/args.h"
#include "kernels/moe/row_groups.h"
#include "kernels/moe/rows.h"
#include "kernels/moe/segments.h"

namespace jax_ep {

// As RowCounts, from a user's counts, each of which is checked, and without dropped rows.
struct BoundedCounts {
  const int32_t* counts;  // [sources, local_experts]
  int sources, local_experts, alignment;
  Bound* bound;
  Quotas steps;  // of the experts
  int end = -1;

  JAX_EP_FN int operator()(int expert) const {
    int rows = 0;
    for (int source = 0; source < sources; ++source) rows += bound->count(counts[source * local_experts + expert]);
    return smaller(rows, steps.of(expert) * alignment);
  }
};

// Zeroes the rows without a token, as a dispatch does. All lanes call.
JAX_EP_FN void pad(Op& op, const ScatterArgs& args, Bound* bound) {
  if (op.coop.receiver.empty() || !zeroes_rows(args)) return;
  const int ranks = op.comm.size, local = args.local_experts, alignment = args.alignment, capacity = args.capacity;
  // With one step beyond the capacity, `end` shows whether rows exceed it.
  BoundedCounts counts{args.counts, ranks, local, alignment, bound, {capacity / alignment + 1, 0}};
  counts.end = for_each_segment(op.coop, local, alignment, counts, [](int, const Segment&) {});
  if (counts.end > capacity) counts.steps = step_quotas(op.coop, args.counts, ranks, local, alignment, capacity);
  zero_padding(op, args, args.rows, row_bytes(args), counts);
}

// Hands out tokens one by one. If tokens are few, the constructor claims one for each of the first senders. All other
// senders draw tickets. The wait for peers that follows hides the latency.
class ScatteredTokens {
 public:
  JAX_EP_FN ScatteredTokens(Op& op, int tokens) : items_(op, tokens, tokens <= kFewTokens) {}

  JAX_EP_FN int next() {
    const int token = items_.next();
    return items_.was_stolen(token) ? items_.next() : token;
  }
  JAX_EP_FN int next_stolen() { return items_.next_stolen(); }

 private:
  PushItems items_;
};

template <bool kGrouped>
JAX_EP_FN auto scattered_tokens(Op& op, const ScatterArgs& args) {
  if constexpr (kGrouped)
    return PushItems(op, args.num_tokens, /*own_first=*/false,
                     group_items(args.num_tokens, args.top_k, op.coop.sender.count));
  else
    return ScatteredTokens(op, args.num_tokens);
}

template <bool kGrouped>
JAX_EP_FN void run_scatter(const Comm& comm, const ScatterArgs& args, const Coop& coop) {
  Op op(comm, coop, kind_of(args));
  const int64_t bytes = row_bytes(args);
  const Results<ScatterArgs> results(args, comm.size);
  if (!args.onto) op.poison(results);
  op.post(window_addresses(args, comm.size));
  RowMover mover(coop);
  Bound targets(RoutingLeaf::targets, comm.size * args.capacity), rows(RoutingLeaf::row_of, args.capacity);
  if (!coop.sender.empty()) {
    const auto tokens = scattered_tokens<kGrouped>(op, args);
    op.wait_posted();
    const RowSink rows_at(op, args.targets, args.top_k, args.capacity, kWindow<&ScatterArgs::rows>);
    const auto packed = [&](int token, int k) { return rows_at.packed(token, k); };
    const auto source = [&](int token) { return args.tokens + token * bytes; };
    const auto sink = [&](int token, int k, int packed) {
      return rows_at.row_at(rows_at.target(token, k, targets.index(packed)), bytes);
    };
    const auto before_last = [&] { targets.report_to_all(op); };
    if (op.ok())
      push_tokens<kGrouped>(op, mover, tokens, args.num_tokens, bytes, args.top_k, packed, source, sink, before_last);
  }
  Bound counts(RoutingLeaf::counts, args.num_tokens * args.top_k + 1);  // of the assignments of a rank
  if (!args.onto) pad(op, args, &counts);
  const auto valid = [&](int row) { return rows.index(row); };
  if constexpr (kGrouped) {
    const auto from = [&](int, int, int row) { return args.rows + row * bytes; };
    copy_arrivals(op, mover, args.row_of, args.num_tokens, /*own=*/0, args.top_k, args.rows, bytes, from, valid);
  } else {
    for_each_arrival(op, args.num_tokens, /*own=*/false, [&](int source, Range tokens) {
      const int32_t* table = args.row_of + int64_t{source} * args.num_tokens * args.top_k;
      const int tokens_here = copy_to_rows(
          coop, mover, {tokens.begin, tokens.end, 1}, args.rows, bytes, table, args.top_k,
          [&](int, int row) { return args.rows + row * bytes; }, valid);
      if (coop.lane == 0) op.count_received(source, tokens_here * bytes);
    });
  }
  mover.complete_to(mover.puts());
  rows.report(op);
  counts.report(op);
  op.finish(results);
}

template <class = NoFormat>
JAX_EP_FN void run_kernel(const Comm& comm, const ScatterArgs& args, const Coop& coop) {
  run_scatter<false>(comm, args, coop);
}
template <class = NoFormat>
JAX_EP_FN void run_kernel(const Comm& comm, const GroupedScatterArgs& args, const Coop& coop) {
  run_scatter<true>(comm, args, coop);
}

inline std::variant<ScatterArgs, GroupedScatterArgs> kernel_of(const ScatterArgs& args, int, int) {
  if (takes_groups(args.num_tokens, args.top_k, row_bytes(args))) return GroupedScatterArgs{args};
  return args;
}

}  // namespace jax_ep
