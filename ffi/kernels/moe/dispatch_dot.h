// dispatch_ragged_dot: a dispatch, and the product of the rows that arrive with the matrices of their experts. Some
// CTAs dispatch before they multiply; the others begin with the product, tile by tile as rows are here. Whoever
// dispatches never waits for whoever multiplies.
#pragma once

#include "gemm/schedule.h"
#include "kernels/moe/dispatch.h"
#include "rows/plain_product.h"

namespace jax_ep {

// A word for each row block, kBlockM rows of the result from a multiple of kBlockM on: it counts rows that hold their
// tokens, and becomes a flag with the last. The routers clear it, before rows are laid out.
class ReadyRows {
 public:
  JAX_EP_FN ReadyRows(Op& op, const DispatchDotArgs& args) : op_(op), args_(args) {}

  JAX_EP_FN void clear(Part part) const {
    const int words = ceil_div(args_.capacity, gemm::kBlockM), step = part.count * Coop::lanes;
    for (int i = part.index * Coop::lanes + op_.coop.lane; i < words; i += step) args_.ready[i] = 0;
  }

  // Waits until it is known how many rows each expert has here. Returns whether rows will come: none do if the op has
  // failed, or some rank has no room. Called before await().
  JAX_EP_FN bool await_sizes() const {
    op_.wait_noted(&op_.heap->laid_out);
    return op_.ok() && (args_.drop || Segments(op_, args_).rank_without_room() < 0);
  }

  // Waits until these rows are here: at once, if the op has failed.
  JAX_EP_FN void await(Range rows) const {
    if (rows.begin >= rows.end) return;
    for (int block = rows.begin / gemm::kBlockM; block <= (rows.end - 1) / gemm::kBlockM; ++block)
      op_.wait_noted(&args_.ready[block]);
  }

 protected:
  Op& op_;
  const DispatchDotArgs& args_;
};

// For a receiver: counts the rows of the tokens that it has put when they are written, that is while the next are on
// their way.
template <class Mover>
class RowCounter : ReadyRows {
 public:
  // Made when it is known how many rows each expert has.
  JAX_EP_FN RowCounter(Op& op, const DispatchDotArgs& args, Mover& mover) : ReadyRows(op, args), mover_(mover) {
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
    for (int i = put.tokens.begin * args_.top_k + op_.coop.lane; i < put.tokens.end * args_.top_k; i += Coop::lanes) {
      const int block = table[i] / gemm::kBlockM;
      if (table[i] >= 0) op_.note_when_whole(&args_.ready[block], smaller(gemm::kBlockM, end_ - block * gemm::kBlockM));
    }
  }

  Mover& mover_;
  int end_ = 0;  // behind the last row that will be here
  Put put_;
};

// What the coops do that dispatch, up to the end of the op.
JAX_EP_FN void dispatch_rows(Op& op, const DispatchDotArgs& args) {
  post_dispatch(op, args);
  Router(op, args).route([&](Part part) { ReadyRows(op, args).clear(part); });
  op.wait_posted();
  send_tokens<PlainDispatch>(op, args, [&](PlainDispatch& dispatch) {
    dispatch.expand_counted([&](RowMover& mover) { return RowCounter<RowMover>(op, args, mover); });
  });
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
