// matmul_all_reduce and matmul_reduce_scatter: every rank leaves its product in a buffer of its own, announced block by
// block. Whoever owns some rows fetches them from all ranks, sums them in rank order in float32, and writes the sum to
// every rank, or keeps it. Products of later blocks run meanwhile.
#pragma once

#include "comm/op.h"
#include "comm/push.h"
#include "kernels/matmul/args.h"
#include "kernels/matmul/exchange.h"
#include "kernels/matmul/product.h"
#include "kernels/results.h"
#include "rows/row_sum.h"

namespace jax_ep {

template <class T>
class MatmulReduce {
 public:
  JAX_EP_FN MatmulReduce(Op& op, const MatmulReduceArgs& args)
      : op_(op),
        args_(args),
        blocks_(args.m),
        kept_(args.scatter ? share(args.m, op.comm.rank, op.comm.size) : Range{0, args.m}),
        partials_(op, 0),
        results_(op, 1),
        sums_(op.team, in_words(args.partial, args.result, int64_t{args.n} * sizeof(T))) {
    const int64_t values = int64_t{args.m} * args.n / op.comm.size, batch = kSumValues<T, kPieces>;
    const int64_t batches = values / (batch * op.team.count * kTicketsPerTeam);
    piece_values_ = static_cast<int>(batch * (batches < 1 ? 1 : batches < kMostBatches ? batches : kMostBatches));
  }

  // Takes pieces of blocks in order, until none are left, and sums each once all ranks have announced its block.
  JAX_EP_FN void reduce() {
    const int first = blocks_.chunk_of(kept_.begin);
    const int blocks = kept_.begin < kept_.end ? blocks_.chunk_of(kept_.end - 1) + 1 - first : 0;
    int ready = first;  // where the blocks end that are known to be here
    for (uint64_t asked = op_.ask_for_ticket(); op_.may_push();) {
      const int ticket = op_.take_ticket(asked), block = first + ticket / pieces_per_block();
      if (block >= first + blocks) break;
      asked = op_.ask_for_ticket();
      if (block >= ready) {
        ready = op_.delivered_until(block, first + blocks);
        if (ready == block) {
          sums_.finish();  // a sum that was begun does not wait with the others
          op_.wait_delivered(block);
          if (!op_.ok()) break;
          ready = block + 1;
        }
        op_.enter(Phase::reduce);
        sums_.acquire();
      }
      sum(own_rows(block), ticket % pieces_per_block());
    }
    if (op_.may_push())
      sums_.finish();
    else
      sums_.drop();
    sums_.complete_to(sums_.mark());
  }

  // Until every rank has written its sums here, and fetches nothing any more.
  JAX_EP_FN void conclude() {
    op_.deliver(blocks_.chunks, 1, op_.team.count);
    op_.count_received_by(op_.team.index == 0, [&](int rank) { return received_from(rank); });
    op_.wait_delivered(blocks_.chunks);
  }

 private:
  // Small batches: as many ranks as there may be have some on their way to a team.
  static constexpr int kPieces = kLanePieces < 4 ? kLanePieces : 4;
  static constexpr int kTicketsPerTeam = 8;
  static constexpr int kMostBatches = Team::lanes == 1 ? 512 : 8;

  // An equal share of every block, so that all ranks have as much to do at any time; or what of it this rank keeps.
  JAX_EP_FN Range own_rows(int block) const {
    return args_.scatter ? overlap(blocks_.chunk(block), kept_) : rows_of(op_.comm.rank, block);
  }
  JAX_EP_FN Range rows_of(int rank, int block) const {
    const Range rows = blocks_.chunk(block), theirs = share(rows.end - rows.begin, rank, op_.comm.size);
    return {rows.begin + theirs.begin, rows.begin + theirs.end};
  }
  // Bytes: a rank's part of the sums of this rank, and the sums of that one.
  JAX_EP_FN int64_t received_from(int rank) const {
    const auto rows_in = [&](int block) {
      const Range mine = rows_of(op_.comm.rank, block), theirs = rows_of(rank, block);
      return mine.end - mine.begin + theirs.end - theirs.begin;
    };
    const int last = blocks_.chunks - 1;  // the others are of one size
    const int rows = args_.scatter ? kept_.end - kept_.begin : last * rows_in(0) + rows_in(last);
    return rows * int64_t{args_.n} * static_cast<int>(sizeof(T));
  }
  JAX_EP_FN int pieces_per_block() const {
    const int rows = args_.scatter ? blocks_.block_rows : (blocks_.block_rows + op_.comm.size - 1) / op_.comm.size;
    return static_cast<int>((int64_t{rows} * args_.n + piece_values_ - 1) / piece_values_);
  }

  // Rows follow each other without gaps: a piece of them is a range of values.
  JAX_EP_FN void sum(Range rows, int piece) {
    const int64_t end = int64_t{rows.end} * args_.n,
                  begin = int64_t{rows.begin} * args_.n + int64_t{piece} * piece_values_;
    if (begin >= end) return;
    const auto terms = line_up<const T>(op_.team, op_.comm.size, [&](int rank) {
      return Term<const T>{reinterpret_cast<const T*>(partials_.of(rank)) + begin, 1.0f};
    });
    const auto places = line_up<char>(op_.team, args_.scatter ? 1 : op_.comm.size, [&](int i) {
      char* result = args_.scatter ? args_.result : results_.of(i);
      return Term<char>{result + (begin - int64_t{args_.scatter ? kept_.begin : 0} * args_.n) * sizeof(T), 1.0f};
    });
    sums_.sum(terms, places, static_cast<int>(end - begin < piece_values_ ? end - begin : piece_values_));
  }

  Op& op_;
  const MatmulReduceArgs& args_;
  const RowBlocks blocks_;
  const Range kept_;
  const PeerBuffer partials_, results_;
  RowSum<T, kPieces> sums_;
  int piece_values_;
};

// Where a rank's product is computed by the very teams that reduce.
template <class T>
JAX_EP_FN void reduce_products(Op& op, const MatmulReduceArgs& args) {
  op.post(args.partial, args.result);
  const RowBlocks blocks(args.m);
  for (int block = 0; block < blocks.chunks && op.may_push(); ++block) {
    const Range rows = blocks.chunk(block), mine = share(rows.end - rows.begin, op.team.index, op.team.count);
    const int64_t first = rows.begin + mine.begin;
    multiply_rows(args.operand_dtype, args.a + first * args.k * size_of(args.operand_dtype),
                  Factor{args.b, args.k, args.n, args.transpose_b}, reinterpret_cast<T*>(args.partial) + first * args.n,
                  mine.end - mine.begin);
    op.deliver(block, 1, op.team.count);
  }
  op.wait_posted();
  MatmulReduce<T> sums(op, args);
  sums.reduce();
  sums.conclude();
}

template <class T>
JAX_EP_FN void run_kernel(const Comm& comm, const MatmulReduceArgs& args, const Team& team) {
  Op op(comm, team, kind_of(args));
  const Results<MatmulReduceArgs> results(args, comm.size);
  op.poison(results);
  if (comm.size == kExchangingRanks)
    exchange_products<T>(op, args);
  else
    reduce_products<T>(op, args);
  op.finish(results);
}

}  // namespace jax_ep
