// dispatch_ragged_dot: a dispatch, and the product of the rows that arrive with the matrices of their experts. Some
// CTAs dispatch before they multiply; the others begin with the product, tile by tile as rows are here. Whoever
// dispatches never waits for whoever multiplies.
#pragma once

#include "gemm/schedule.h"
#include "kernels/moe/dispatch.h"
#include "kernels/moe/dot_args.h"
#include "kernels/moe/ready.h"
#include "kernels/plain_product.h"

namespace jax_ep {

// What the coops do that dispatch, up to the end of the op.
JAX_EP_FN void dispatch_rows(Op& op, const DispatchDotArgs& args) {
  post_dispatch(op, args);
  Router(op, args).route([&](Part part) { ReadyRows(op, args).clear(part); });
  op.wait_posted();
  send_tokens<PlainDispatch>(op, args, [&](PlainDispatch& dispatch) { dispatch.expand_counted(args); });
}

// The rows that a tile multiplies: none behind the last expert's, where the product is zero.
JAX_EP_FN Range rows_of(const gemm::Tile& tile) {
  if (tile.k_begin >= tile.k_end) return {tile.row, tile.row};
  return {tile.row, smaller(tile.row + gemm::kBlockM, tile.row_end)};
}

// Where the product is computed by plain loops: the share of both CTAs of a cluster, in tiles as wide as the result.
template <class T>
JAX_EP_FN void multiply_arrived(Op& op, const DispatchDotArgs& args, gemm::Share share) {
  const ReadyRows ready(op, args);
  if (!ready.await_sizes()) return;
  const gemm::Problem problem = product_of(args, op.comm.size, /*band=*/1);
  for (const int last = share.cta + gemm::kCluster; share.cta < last; ++share.cta) {
    gemm::Schedule schedule(problem, args.columns, share);
    for (gemm::Tile tile; schedule.next(&tile);) {
      if (tile.col >= args.columns) continue;
      const Range rows = rows_of(tile);
      T* const out = reinterpret_cast<T*>(args.product) + int64_t{tile.row} * args.columns;
      ready.await(rows);
      const int64_t matrix = int64_t{args.hidden} * args.columns;
      if (rows.begin < rows.end)
        multiply_rows(reinterpret_cast<const T*>(args.received) + int64_t{tile.row} * args.hidden,
                      Factor{args.rhs + tile.group * matrix * int64_t{sizeof(T)}, args.hidden, args.columns, false},
                      out, rows.end - rows.begin);
      else
        for (int64_t i = 0; i < int64_t{smaller(gemm::kBlockM, tile.row_end - tile.row)} * args.columns; ++i)
          from_float(0.0f, &out[i]);
    }
  }
}

// A coop plays a whole cluster here. The first ones, about half of them, dispatch before they multiply.
template <class T>
JAX_EP_FN void run_kernel(const Comm& comm, const DispatchDotArgs& args, const Coop& coop) {
  const Results<DispatchDotArgs> results(args, comm.size);
  const int dispatching = (coop.count + 1) / 2, ends = dispatching + coop.count;
  if (coop.index < dispatching) {
    const Coop one_of_them = as_member(coop, {coop.cta.index, dispatching});
    Op op(comm, one_of_them, kind_of(args));
    op.poison(results);
    dispatch_rows(op, args);
    op.finish(results, ends);
  }
  Op op(comm, coop, kind_of(args));
  const gemm::Share share{coop.index * gemm::kCluster, coop.count * gemm::kCluster, dispatching * gemm::kCluster, 1};
  multiply_arrived<T>(op, args, share);
  op.finish(results, ends);
}

}  // namespace jax_ep
