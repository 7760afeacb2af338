// dispatch_ragged_dot: a dispatch, and the product of the rows that arrive with the matrices of their experts. On a GPU
// the dispatch is a kernel on rows, and the product another beside it, which waits for the words of the first; a coop
// of a CPU dispatches, then multiplies.
#pragma once

#include <cmath>

#include "kernels/moe/arrivals.h"
#include "kernels/moe/dispatch.h"

namespace jax_ep {

// What each coop does up to the end of the op. Returns whether rows come: none do if the op has failed, or some rank
// has no room.
JAX_EP_FN bool dispatch_rows(Op& op, const DispatchDotArgs& args) {
  const ArrivalWords at(args.capacity);
  const TokensInOrder sent{args.order, args.num_tokens, args.eager};
  const auto clear = [&](Part part) {
    if (Coop::lanes == 1) clear_words(op.coop, args.words, at.count(), part);
  };
  const auto push = [&](PlainDispatch& dispatch, const Routed& routed) {
    const auto work_out = [&] {
      const FirstRowOrder order(op, args, kWindow<&DispatchDotArgs::order>);
      routed.await_placed();
      order.count();
      order.put();
      op.enter(Phase::send);
    };
    OrderedTokens tokens(op, sent, work_out);
    dispatch.push(SharedItems<decltype(tokens)>{tokens}, [&](int) { return tokens.token(); });
  };
  post_dispatch(op, args);
  Router(op, args).route(clear, [&](bool first) {
    if (first) note_laid_out(op, args);
  });
  op.wait_posted();
  return send_tokens<PlainDispatch>(op, args, push, [&](PlainDispatch& dispatch) {
    dispatch.expand_counted(sent, [&](RowMover& mover) { return ArrivalCounter<RowMover>(op, args, sent, mover); });
  });
}

// A GPU's kernel on rows, without the product. The words are zeros when it begins.
JAX_EP_FN void dispatch_in_order(const Comm& comm, const DispatchDotArgs& args, const Coop& coop) {
  Op op(comm, coop, kind_of(args));
  op.poison(Results<DispatchDotArgs>(args, comm.size));
  dispatch_rows(op, args);
  finish_arrivals(op, args);
}

// As jax.nn has them, gelu by tanh.
JAX_EP_FN float activated(gemm::Activation activation, float x) {
  switch (activation) {
    case gemm::Activation::silu:
      return x / (1 + std::exp(-x));
    case gemm::Activation::gelu:
      return 0.5F * x * (1 + std::tanh(0.7978845608F * (x + 0.044715F * x * x * x)));
    default:
      return x > 0 ? x : 0;
  }
}

// On a CPU: a tile of the product, or of the gated unit.
template <class T>
JAX_EP_FN void multiply_tile(const gemm::Problem& problem, const DispatchDotArgs& args, const gemm::Tile& tile) {
  const Factor whole{args.rhs, problem.k, args.columns, /*transposed=*/false};
  const GroupedFactors first{args.received, whole};
  if (!args.gated) return multiply_tile<T>(first, args.product, tile);
  const Range rows = stored_rows(tile);
  const GroupedFactors second{args.received, {args.pair ? args.up : args.rhs, whole.k, whole.n, whole.transposed}};
  const int n = problem.n, up_column = args.columns - n, count = rows.end - rows.begin;
  const int64_t kept = int64_t{tile.row} * args.columns;
  T* const out = reinterpret_cast<T*>(args.product) + int64_t{tile.row} * n;
  for (int row = 0; row < count; ++row)
    for (int column = 0; column < n; ++column) {
      T of[2] = {};
      if (tile.k_begin < tile.k_end) {
        of[0] = value_of_product<T>(first.at(tile.row, tile.group, sizeof(T)), row, column);
        of[1] = value_of_product<T>(second.at(tile.row, tile.group, sizeof(T)), row, up_column + column);
      }
      if (args.keeps_products) {
        T* const gates = reinterpret_cast<T*>(args.of_gate) + kept;
        T* const ups = args.pair ? reinterpret_cast<T*>(args.of_up) + kept : gates;
        gates[int64_t{row} * args.columns + column] = of[0];
        ups[int64_t{row} * args.columns + up_column + column] = of[1];
      }
      T active;
      from_float(activated(args.activation, to_float(of[0])), &active);
      from_float(to_float(active) * to_float(of[1]), &out[int64_t{row} * n + column]);
    }
}

template <class T>
JAX_EP_FN void run_kernel(const Comm& comm, const DispatchDotArgs& args, const Coop& coop) {
  const Coop both = as_member(coop, {coop.index, coop.count});  // sends and receives
  Op op(comm, both, kind_of(args));
  op.poison(Results<DispatchDotArgs>(args, comm.size));
  const gemm::Problem problem = product_of(args, comm.size, /*band=*/1);
  if (dispatch_rows(op, args))
    multiply_arrived(op, args, [&](const gemm::Tile& tile) { multiply_tile<T>(problem, args, tile); });
  finish_arrivals(op, args);
}

}  // namespace jax_ep
