// Which rows of a dispatch are here, for a product that begins before all are.
#pragma once

#include "kernels/moe/dot_args.h"
#include "kernels/moe/rows.h"
#include "kernels/moe/segments.h"

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

}  // namespace jax_ep
