// ragged_dot_combine: the product of rows with the matrices of their experts, and the combine of it, in two kernels.
// The second begins on the SMs that the first leaves to it, and a token leaves as soon as the last of its rows is
// written. Whoever multiplies waits for nobody. On a CPU the same coops do both.
#pragma once

#include "comm/ctas.h"
#include "kernels/moe/combine.h"
#include "kernels/moe/dot_args.h"
#include "kernels/moe/sending_order.h"
#include "kernels/moe/tile_rows.h"

namespace jax_ep {

// Few tokens go in their own order: their product ends at once.
JAX_EP_FN bool goes_in_order(const DotCombineArgs& args) { return args.num_tokens > kFewTokens; }

// Tokens are sent by the row block of their last row here, as the product is computed in the order of rows; and those
// first that have none. Returns when all of `order` is written, or the op has failed. Called when the words are clear.
JAX_EP_FN void order_by_last_rows(Op& op, const DotCombineArgs& args) {
  // Rows out of bounds are not followed; whoever sums them reports them.
  const auto bin_of = [&](int index) {
    const SentRow sent = sent_row(op.comm, index);
    const int32_t* const rows = args.rows + (int64_t{sent.home} * args.num_tokens + sent.token) * args.top_k;
    int last = -1;
    for (int k = 0; k < args.top_k; ++k)
      if (rows[k] < args.capacity) last = larger(last, rows[k]);
    return last < 0 ? 0 : 1 + last / gemm::kBlockM;
  };
  const SendingOrder order(op, args.words, DotCombineWords(args.capacity).sort(), (op.comm.size - 1) * args.num_tokens);
  order.count(bin_of);
  order.put(bin_of, [&](int position, int index) {
    if (position >= 0) args.order[position] = index;
  });
}

// The product's rows, for Combine.
class ProductRows {
 public:
  static constexpr bool kAtOnce = false;
  const char* const rows;

  JAX_EP_FN ProductRows(Op& op, const DotCombineArgs& args)
      : rows(args.product),
        written_(op, args.words, args.capacity, args.hidden),
        order_(goes_in_order(args) ? args.order : nullptr) {}

  // Which is the index-th to be sent.
  JAX_EP_FN int sent(int index) const { return order_ ? order_[index] : index; }

  // Whether a row and all before it are known to be here. Tiles are computed in this order: to wait for all of them is
  // to wait for the last, and each row block is looked at once.
  JAX_EP_FN bool has(int row) const { return row < here_; }
  JAX_EP_FN void await(int row) {
    if (has(row)) return;
    written_.await({here_, row + 1});
    here_ = (row / gemm::kBlockM + 1) * gemm::kBlockM;
  }

 private:
  const CountedRows written_;
  const int32_t* const order_;
  int here_ = 0;
};

// By all coops that combine; the peers learn of their buffers.
template <class T>
JAX_EP_FN void combine_rows(Op& op, const DotCombineArgs& args) {
  op.post(posted(args, op.comm.size));
  if (goes_in_order(args)) order_by_last_rows(op, args);
  if (!op.ok()) return;  // then it may not be written
  Combine<T, kLanePacks, ProductRows> combine(op, args, ProductRows(op, args));
  combine.push();
  combine.reduce();
  combine.complete();
}

// The second kernel. The words are zero when the first begins.
template <class T>
JAX_EP_FN void combine_product(const Comm& comm, const DotCombineArgs& args, const Coop& coop) {
  Op op(comm, coop, kind_of(args));
  const Results<DotCombineArgs> results(args, comm.size);
  op.poison(results);
  combine_rows<T>(op, args);
  op.finish(results);
}

// This coop's share of the product, where there is no core: a coop plays a whole cluster.
template <class T>
JAX_EP_FN void multiply_share(const Op& op, const DotCombineArgs& args, const CountedRows& written) {
  const gemm::Problem problem = product_of(args, op.comm.size, /*band=*/1);
  const gemm::Share share{op.coop.index * gemm::kCluster, op.coop.count * gemm::kCluster};
  const GroupedFactors term{args.lhs, {args.rhs, problem.k, problem.n, /*transposed=*/false}};
  each_tile(
      problem, share, [](const gemm::Tile&) { return true; },
      [&](const gemm::Tile& tile) { multiply_tile<T>(term, args.product, tile); },
      [&](const gemm::Tile& tile) { written.count(stored_rows(tile)); });
}

// Both halves. The first coop clears the words.
template <class T>
JAX_EP_FN void run_kernel(const Comm& comm, const DotCombineArgs& args, const Coop& coop) {
  const Coop both = as_member(coop, {coop.index, coop.count});  // sends and receives
  Op op(comm, both, kind_of(args));
  const Results<DotCombineArgs> results(args, comm.size);
  op.poison(results);
  if (op.coop.index == 0) clear_words(op.coop, args.words, DotCombineWords(args.capacity).count(), {0, 1});
  op.note(&op.heap->laid_out, op.coop.index == 0);
  op.wait_noted(&op.heap->laid_out);
  if (op.ok()) {
    multiply_share<T>(op, args, CountedRows(op, args.words, args.capacity, args.hidden));
    combine_rows<T>(op, args);
  }
  op.finish(results);
}

}  // namespace jax_ep
