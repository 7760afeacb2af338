// dispatch_ragged_dot: a dispatch, and the product of the rows that arrive with the matrices of their experts. Some
// CTAs dispatch before they multiply; the others begin with the product, tile by tile as rows are here. Whoever
// dispatches never waits for whoever multiplies.
#pragma once

#include "kernels/moe/dispatch.h"
#include "kernels/moe/dot_args.h"
#include "kernels/moe/tile_rows.h"

namespace jax_ep {

// Waits until it is known how many rows each expert has here. Returns whether rows will come: none do if the op has
// failed, or some rank has no room. Called before anybody waits for rows.
JAX_EP_FN bool await_sizes(Op& op, const DispatchDotArgs& args) {
  op.wait_noted(&op.heap->laid_out);
  return op.ok() && (args.drop || Segments(op, args).rank_without_room() < 0);
}

// For a receiver: counts the rows of the tokens that it has put when they are written, that is while the next are on
// their way.
template <class Mover>
class RowCounter {
 public:
  // Made when it is known how many rows each expert has.
  JAX_EP_FN RowCounter(Op& op, const DispatchDotArgs& args, Mover& mover)
      : op_(op), args_(args), ready_(op, args.ready, args.capacity), mover_(mover) {
    const int local = args.num_experts / op.comm.size;
    for (int first = 0; first < local; first += Coop::lanes)
      end_ += op.coop.sum(first + op.coop.lane < local ? args.group_sizes[first + op.coop.lane] : 0);
  }

  // Tokens of a source were put into all of their rows.
  JAX_EP_FN void after(int source, Range tokens) {
    const Put last = put_;
    put_ = {source, tokens, mover_.mark()};
    count(last);
  }
  // Nothing is put for a while.
  JAX_EP_FN void finish() {
    count(put_);
    put_ = {};
  }

 private:
  struct Put {
    int source = 0;
    Range tokens{0, 0};
    int mark = 0;
  };

  JAX_EP_FN void count(const Put& put) const {
    if (put.tokens.begin >= put.tokens.end) return;
    mover_.complete_to(put.mark);
    const int32_t* const table = args_.rows + int64_t{put.source} * args_.num_tokens * args_.top_k;
    for (int i = put.tokens.begin * args_.top_k + op_.coop.lane; i < put.tokens.end * args_.top_k; i += Coop::lanes)
      if (table[i] >= 0) ready_.count(table[i], end_);
  }

  Op& op_;
  const DispatchDotArgs& args_;
  const ReadyRows ready_;
  Mover& mover_;
  int end_ = 0;  // behind the last row that will be here
  Put put_;
};

// What the coops do that dispatch, up to the end of the op.
JAX_EP_FN void dispatch_rows(Op& op, const DispatchDotArgs& args) {
  post_dispatch(op, args);
  Router(op, args).route([&](Part part) { clear_words(op.coop, args.ready, ReadyRows::blocks(args.capacity), part); });
  op.wait_posted();
  send_tokens<PlainDispatch>(op, args, [&](PlainDispatch& dispatch) {
    dispatch.expand_counted([&](RowMover& mover) { return RowCounter<RowMover>(op, args, mover); });
  });
}

// Where the product is computed by plain loops: the share of both CTAs of a cluster.
template <class T>
JAX_EP_FN void multiply_arrived(Op& op, const DispatchDotArgs& args, gemm::Share share) {
  if (!await_sizes(op, args)) return;
  const ReadyRows ready(op, args.ready, args.capacity);
  multiply_plainly<T>(
      product_of(args, op.comm.size, /*band=*/1), args.received, args.rhs, args.product, share,
      [&](const gemm::Tile& tile) { ready.await(multiplied_rows(tile)); }, [](const gemm::Tile&) {});
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
