// Rows that a product waits for: tokens that are not eager are sent by the row block of their first row at any owner,
// so that the first experts' rows are whole early, and a rank counts the rows that are here. What the product looks at
// is ArrivalWords.
#pragma once

#include "comm/push.h"
#include "comm/window.h"
#include "kernels/moe/dot_args.h"
#include "kernels/moe/rows.h"
#include "kernels/moe/sending_order.h"
#include "kernels/moe/tile_rows.h"

namespace jax_ep {

// Which token of a source is sent at which position; eager ones are at their own. Chunks and their flags are of
// positions. A source writes its order at every rank before it sends the first token that is not eager, so whoever has
// seen a chunk of it delivered may read the order of that chunk.
struct TokensInOrder {
  const int32_t* order;  // [R, T]
  int num_tokens, eager;

  // The token, or -1 where a peer has written none of its tokens.
  JAX_EP_FN int at(int source, int position) const {
    if (position < eager) return position;
    const int token = order[int64_t{source} * num_tokens + position];
    return static_cast<uint32_t>(token) < static_cast<uint32_t>(num_tokens) ? token : -1;
  }

  // Its next() gives the tokens of a source at some positions, then -1.
  struct Walk {
    const TokensInOrder& sent;
    int source;
    Range positions;

    JAX_EP_FN int next() {
      while (positions.begin < positions.end)
        if (const int token = sent.at(source, positions.begin++); token >= 0) return token;
      return -1;
    }
  };
  JAX_EP_FN Walk walk(int source, Range positions) const { return {*this, source, positions}; }
};

// The order of this rank's tokens, worked out by its senders: count() when its targets are known, then put() when all
// ranks have posted their `order`, which is the window of this number. Targets out of bounds are not followed.
class FirstRowOrder {
 public:
  JAX_EP_FN FirstRowOrder(Op& op, const DispatchDotArgs& args, int window)
      : op_(op),
        sort_(op, args.words, ArrivalWords(args.capacity).sort(), args.num_tokens - args.eager),
        targets_(args.targets),
        num_tokens_(args.num_tokens),
        top_k_(args.top_k),
        eager_(args.eager),
        capacity_(args.capacity),
        window_(window),
        by_capacity_(args.capacity) {}

  JAX_EP_FN void count() const {
    sort_.count([&](int item) { return bin_of(item); });
  }
  JAX_EP_FN void put() const {
    const LaneWindow<int32_t> orders(op_, window_);
    const int64_t mine = int64_t{op_.comm.rank} * num_tokens_ + eager_;
    sort_.put([&](int item) { return bin_of(item); },
              [&](int position, int item) {
                for (int rank = 0; rank < op_.comm.size; ++rank) {
                  int32_t* const there = orders.peer(rank);
                  if (position >= 0) there[mine + position] = eager_ + item;
                }
              });
  }

 private:
  JAX_EP_FN int bin_of(int item) const {
    const int32_t* const targets = targets_ + int64_t{eager_ + item} * top_k_;
    int first = capacity_;
    for (int k = 0; k < top_k_; ++k)
      if (targets[k] >= 0 && targets[k] < op_.comm.size * capacity_)
        first = smaller(first, unpack_target(targets[k], capacity_, by_capacity_).row);
    return first < capacity_ ? first / gemm::kBlockM : gemm::row_blocks(capacity_);
  }

  Op& op_;
  const SendingOrder sort_;
  const int32_t* const targets_;
  const int num_tokens_, top_k_, eager_, capacity_, window_;
  const Divider by_capacity_;
};

// Hands out the positions of this rank's tokens, as push_chunks asks for them; token() is that of the last. Before the
// first that is not eager, and behind the announcement of those that are, it calls work_out(). None once the op has
// failed.
template <class WorkOut>
class OrderedTokens {
 public:
  JAX_EP_FN OrderedTokens(Op& op, const TokensInOrder& sent, WorkOut work_out)
      : op_(op), sent_(sent), items_(op, sent.num_tokens), work_out_(work_out) {}

  JAX_EP_FN int next() {
    const int position = items_.next();
    if (position < sent_.eager || known_) return hand_out(position);
    waiting_ = position;
    return -1;
  }
  JAX_EP_FN int next_abandoned() {
    if (waiting_ < 0) return -1;
    const int position = waiting_;
    waiting_ = -1;
    known_ = true;
    work_out_();
    return hand_out(position);
  }
  JAX_EP_FN int token() const { return token_; }

 private:
  JAX_EP_FN int hand_out(int position) {
    if (position < 0 || !op_.ok()) return -1;
    token_ = sent_.at(op_.comm.rank, position);  // on its way before the row that it names is asked for
    return position;
  }

  Op& op_;
  const TokensInOrder sent_;
  PushItems items_;
  WorkOut work_out_;
  bool known_ = false;  // the order
  int waiting_ = -1, token_ = -1;
};

// Items that several share: push_chunks takes its own by value.
template <class Items>
struct SharedItems {
  Items& items;
  JAX_EP_FN int next() { return items.next(); }
  JAX_EP_FN int next_abandoned() { return items.next_abandoned(); }
};

// For a receiver: counts the rows of the tokens that it has put when they are written, that is while the next are on
// their way.
template <class Mover>
class ArrivalCounter {
 public:
  // Made when the words are clear.
  JAX_EP_FN ArrivalCounter(Op& op, const DispatchDotArgs& args, const TokensInOrder& sent, Mover& mover)
      : op_(op),
        at_(args.capacity),
        words_(args.words),
        rows_(args.rows),
        top_k_(args.top_k),
        capacity_(args.capacity),
        by_top_k_(args.top_k),
        sent_(sent),
        mover_(mover) {}

  // Tokens of a source, at these positions, were put into all of their rows.
  JAX_EP_FN void after(int source, Range positions) {
    const Put last = put_;
    put_ = {source, positions, mover_.mark()};
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
    Range positions{0, 0};
    int mark = 0;
  };

  // Lanes whose rows are of one block count together. Rows out of bounds are not counted.
  JAX_EP_FN void count(const Put& put) const {
    if (put.positions.begin >= put.positions.end) return;
    mover_.complete_to(put.mark);
    const int end = put.positions.end * top_k_;
    for (int first = put.positions.begin * top_k_; first < end; first += Coop::lanes) {
      const int i = first + op_.coop.lane, row = i < end ? row_of(put.source, i) : -1;
      const int block = row < 0 || row >= capacity_ ? -1 : row / gemm::kBlockM;
      const Match alike = op_.coop.match(block);
      if (block >= 0 && alike.below == 0) fetch_add(&words_[at_.arrived() + block], static_cast<uint64_t>(alike.total));
    }
    op_.coop.sync();
    if (Coop::lanes == 1)
      fetch_add(&words_[at_.taken()], static_cast<uint64_t>(put.positions.end - put.positions.begin));
  }

  // The row of an assignment, counted by positions.
  JAX_EP_FN int row_of(int source, int i) const {
    const int position = by_top_k_.quotient(i), token = sent_.at(source, position);
    if (token < 0) return -1;
    return rows_[(int64_t{source} * sent_.num_tokens + token) * top_k_ + i - position * top_k_];
  }

  Op& op_;
  const ArrivalWords at_;
  uint64_t* const words_;
  const int32_t* const rows_;
  const int top_k_, capacity_;
  const Divider by_top_k_;
  const TokensInOrder sent_;
  Mover& mover_;
  Put put_;
};

// By one coop, when `group_sizes` are written, and those that wrote them have met.
JAX_EP_FN void note_laid_out(const Op& op, const DispatchDotArgs& args) {
  const int local = args.num_experts / op.comm.size;
  for (int e = op.coop.lane; e < local; e += Coop::lanes) args.sizes[e] = args.group_sizes[e];
  op.coop.sync();
  if (op.ok() && op.coop.lane == 0) store_release_here(&args.words[ArrivalWords(0).laid_out()], ArrivalWords::kYes);
}

// Ends the op; every coop calls it, as Op::finish.
JAX_EP_FN void finish_arrivals(Op& op, const DispatchDotArgs& args) {
  const Outcome outcome = op.finish(Results<DispatchDotArgs>(args, op.comm.size));
  if (outcome == Outcome::running || op.coop.lane != 0) return;
  const bool delivered = outcome == Outcome::delivered;
  store_release_here(&args.words[ArrivalWords(0).over()], delivered ? ArrivalWords::kYes : ArrivalWords::kNothing);
}

// On a CPU: waits until a word counts `least`, or is_over() says that it will not. Returns whether the op may go on.
// The coops that count wait for peers, within bounds, and raise the abort word.
template <class IsOver>
JAX_EP_FN bool await_count(const Op& op, const uint64_t* word, uint64_t least, IsOver is_over) {
  for (unsigned tries = 0; op.may_push(); ++tries) {
    if (load_acquire(word) >= least || is_over()) return true;
    pause(tries);
  }
  return false;
}

// On a CPU: calls multiply(tile) for this coop's share of the product of rows that will be here. A tile waits until its
// rows are counted, or all tokens are taken in.
template <class Multiply>
JAX_EP_FN void multiply_arrived(Op& op, const DispatchDotArgs& args, Multiply multiply) {
  const ArrivalWords at(args.capacity);
  const uint64_t all = static_cast<uint64_t>(op.comm.size) * args.num_tokens;
  const auto are_all_taken = [&] { return load_acquire(&args.words[at.taken()]) == all; };
  op.wait_noted(&op.heap->laid_out);  // the words are clear
  if (!op.ok() || !await_count(op, &args.words[at.laid_out()], ArrivalWords::kYes, [] { return false; })) return;
  const gemm::Problem problem = product_of(args, op.comm.size, /*band=*/1);
  int end = 0;
  for (int group = 0; group < problem.groups; ++group) end += problem.group_sizes[group];
  const auto await_rows = [&](const gemm::Tile& tile) {
    const Range rows = multiplied_rows(tile);
    for (int row = rows.begin / gemm::kBlockM * gemm::kBlockM; row < rows.end; row += gemm::kBlockM) {
      const auto count = static_cast<uint64_t>(smaller(gemm::kBlockM, end - row));
      if (!await_count(op, &args.words[at.arrived() + row / gemm::kBlockM], count, are_all_taken)) return false;
    }
    return true;
  };
  const gemm::Share share{op.coop.index * gemm::kCluster, op.coop.count * gemm::kCluster};
  each_tile(problem, share, await_rows, multiply, [](const gemm::Tile&) {});
}

}  // namespace jax_ep
