// ragged_dot_combine: the product of rows with the matrices of their experts, and the combine of it. All CTAs multiply,
// some of them less, and combine when they have multiplied: tokens leave as soon as the last of their rows is written.
// Whoever multiplies waits for nobody who combines.
#pragma once

#include "comm/ctas.h"
#include "kernels/moe/combine.h"
#include "kernels/moe/dot_args.h"
#include "kernels/moe/tile_rows.h"

namespace jax_ep {

// The order in which tokens are sent: by the row block of their last row here, as the product is computed in the order
// of rows; and those first that have none. Worked out by whichever coops are free, a counting sort.
class SendingOrder {
 public:
  JAX_EP_FN SendingOrder(Op& op, const DotCombineArgs& args)
      : op_(op),
        args_(args),
        at_(args.capacity),
        rows_((op.comm.size - 1) * args.num_tokens),
        bins_(args.words + at_.tokens()) {}

  // Few tokens go in their own order: their product ends at once.
  JAX_EP_FN static bool is_needed(const DotCombineArgs& args) { return args.num_tokens > kFewTokens; }

  // Returns when all of `order` is written, or the op has failed. Called when the words are clear.
  JAX_EP_FN void work_out() {
    if (rows_ == 0) return;
    op_.enter(Phase::layout);
    uint64_t* const counted = args_.words + at_.counts();
    uint64_t* const put = counted + 1;
    each_part(args_.words + at_.tickets(), [&](Range part) {
      for (int i = part.begin + op_.coop.lane; i < part.end; i += Coop::lanes) draw(&bins_[bin_of(i)]);
      if (is_last(counted, part.end - part.begin)) {
        sum_up();
        op_.note(counted, true);
      }
    });
    op_.wait_noted(counted);
    if (!op_.ok()) return;
    each_part(args_.words + at_.tickets() + 1, [&](Range part) {
      for (int i = part.begin + op_.coop.lane; i < part.end; i += Coop::lanes) args_.order[draw(&bins_[bin_of(i)])] = i;
      op_.coop.sync();
      if (op_.coop.lane == 0) op_.note_when_whole(put, part.end - part.begin, rows_);
    });
    op_.wait_noted(put);
  }

 private:
  static constexpr int kPartRows = Coop::lanes == 1 ? 64 : 4 * Coop::lanes;  // that a coop takes at a time

  template <class Visit>
  JAX_EP_FN void each_part(uint64_t* tickets, Visit visit) const {
    for (;;) {
      const int part = op_.coop.broadcast(op_.coop.lane == 0 ? static_cast<int>(draw(tickets)) : 0);
      if (part >= ceil_div(rows_, kPartRows)) return;
      visit(Range{part * kPartRows, smaller((part + 1) * kPartRows, rows_)});
    }
  }

  // Rows out of bounds are not followed; whoever sums them reports them.
  JAX_EP_FN int bin_of(int index) const {
    const SentRow sent = sent_row(op_.comm, index);
    const int32_t* const rows = args_.rows + (int64_t{sent.home} * args_.num_tokens + sent.token) * args_.top_k;
    int last = -1;
    for (int k = 0; k < args_.top_k; ++k)
      if (rows[k] < args_.capacity) last = larger(last, rows[k]);
    return last < 0 ? 0 : 1 + last / gemm::kBlockM;
  }

  JAX_EP_FN bool is_last(uint64_t* counted, int share) const {
    op_.coop.sync();
    int last = 0;
    if (op_.coop.lane == 0)
      last = fetch_add(counted, static_cast<uint64_t>(share)) + share == static_cast<uint64_t>(rows_);
    last = op_.coop.broadcast(last);
    op_.coop.sync();
    return last;
  }

  // From the tokens of each bin to where it begins.
  JAX_EP_FN void sum_up() const {
    int start = 0;
    for (int first = 0; first < at_.bins(); first += Coop::lanes) {
      const int bin = first + op_.coop.lane;
      const int tokens = bin < at_.bins() ? static_cast<int>(load_relaxed(&bins_[bin])) : 0;
      int total = 0;
      const int before = op_.coop.exclusive_scan(tokens, &total);
      if (bin < at_.bins()) store_relaxed(&bins_[bin], static_cast<uint64_t>(start + before));
      start += total;
    }
    op_.coop.sync();
  }

  Op& op_;
  const DotCombineArgs& args_;
  const DotCombineWords at_;
  const int rows_;
  uint64_t* const bins_;
};

// The product's rows, for Combine.
class ProductRows {
 public:
  static constexpr bool kAtOnce = false;
  const char* const rows;

  JAX_EP_FN ProductRows(Op& op, const DotCombineArgs& args)
      : rows(args.product),
        ready_(op, args.words, args.capacity),
        order_(SendingOrder::is_needed(args) ? args.order : nullptr) {}

  // Which is the index-th to be sent.
  JAX_EP_FN int sent(int index) const { return order_ ? order_[index] : index; }

  // Whether a row and all before it are known to be here. Tiles are computed in this order: to wait for all of them is
  // to wait for the last, and each row block is looked at once.
  JAX_EP_FN bool has(int row) const { return row < here_; }
  JAX_EP_FN void await(int row) {
    if (has(row)) return;
    ready_.await({here_, row + 1});
    here_ = (row / gemm::kBlockM + 1) * gemm::kBlockM;
  }

 private:
  const ReadyRows ready_;
  const int32_t* const order_;
  int here_ = 0;
};

// By one coop of every CTA, before it multiplies. The first CTA, which begins first, clears the words.
JAX_EP_FN void begin_product(Op& op, const DotCombineArgs& args) {
  if (op.coop.index == 0) clear_words(op.coop, args.words, DotCombineWords(args.capacity).count(), {0, 1});
  op.coop.sync();
  op.note(&op.heap->laid_out, op.coop.index == 0);
  note_begun(op.coop, &op.heap->members);
  op.post(posted(args, op.comm.size));
}

// Whether the words are clear, so that written tiles may be counted: not if the op has failed.
JAX_EP_FN bool await_words(Op& op) {
  op.wait_noted(&op.heap->laid_out);
  return op.ok();
}

// By each coop of a CTA of `ctas` when all of the CTA's tiles are written and counted. A coop that does not see all
// CTAs begin leaves, as the others may need its SM; those of the last to begin never do.
template <class T, int kPacks = kLanePacks>
JAX_EP_FN void combine_product(Op& op, const DotCombineArgs& args, int ctas) {
  if (!all_begun(op.coop, &op.heap->members, ctas) || !await_words(op)) return;
  if (SendingOrder::is_needed(args)) SendingOrder(op, args).work_out();
  if (!op.ok()) return;  // then the order may not be written
  Combine<T, kPacks, ProductRows> combine(op, args, ProductRows(op, args));
  combine.push();
  combine.reduce();
  combine.complete();
}

// A coop plays a whole cluster here. The first of them multiply a tile, if there are others.
template <class T>
JAX_EP_FN void run_kernel(const Comm& comm, const DotCombineArgs& args, const Coop& coop) {
  const Coop both = as_member(coop, {coop.index, coop.count});  // sends and receives
  Op op(comm, both, kind_of(args));
  const Results<DotCombineArgs> results(args, comm.size);
  op.poison(results);
  begin_product(op, args);
  const bool counts = await_words(op);
  const ReadyRows ready(op, args.words, args.capacity);
  const gemm::Share share{
      coop.index * gemm::kCluster, coop.count * gemm::kCluster, 0, 0, coop.count / 2 * gemm::kCluster, /*body=*/1};
  multiply_plainly<T>(
      product_of(args, comm.size, /*band=*/1), args.lhs, args.rhs, args.product, share, [](const gemm::Tile&) {},
      [&](const gemm::Tile& tile) {
        if (counts) ready.count(stored_rows(tile), args.hidden, args.hidden);
      });
  combine_product<T>(op, args, coop.count);
  op.finish(results);
}

}  // namespace jax_ep
