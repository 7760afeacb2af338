// matmul_all_reduce and matmul_reduce_scatter: every rank writes its product into its own buffer and announces it row
// block by row block. Each row has an owner, which fetches the row from all ranks, sums it in rank order in float32,
// and writes the sum to every rank, or keeps it. Products of later row blocks run at the same time.
#pragma once

#include "comm/op.h"
#include "comm/push.h"
#include "comm/tickets.h"
#include "comm/window.h"
#include "kernels/collective_matmul/args.h"
#include "rows/pack.h"
#include "rows/plain_matmul.h"
#include "rows/row_sum.h"

namespace jax_ep {

class SummedRows {
 public:
  JAX_EP_FN SummedRows(const Comm& comm, const MatmulReduceArgs& args)
      : row_blocks(args.m),
        kept(args.reduce_scatter ? part_of(args.m, comm.rank, comm.size) : Range{0, args.m}),
        rank_(comm.rank),
        ranks_(comm.size),
        reduce_scatter_(args.reduce_scatter) {}

  const RowBlocks row_blocks;
  const Range kept;  // in the result

  // This rank's rows of a row block: an equal part, so all ranks have equal work. In a reduce-scatter: the rows that it
  // keeps.
  JAX_EP_FN Range of(int row_block) const {
    return reduce_scatter_ ? overlap(row_blocks.chunk(row_block), kept) : of_rank(rank_, row_block);
  }
  // The rows that come from `rank`: its parts of this rank's sums, and its sums.
  JAX_EP_FN int received_from(int rank) const {
    const auto rows_in = [&](int row_block) {
      const Range mine = of_rank(rank_, row_block), theirs = of_rank(rank, row_block);
      return mine.end - mine.begin + theirs.end - theirs.begin;
    };
    const int last = row_blocks.chunks - 1;  // the other row blocks have one size
    return reduce_scatter_ ? kept.end - kept.begin : last * rows_in(0) + rows_in(last);
  }
  JAX_EP_FN int most() const {
    return reduce_scatter_ ? row_blocks.block_rows : ceil_div(row_blocks.block_rows, ranks_);
  }

 private:
  JAX_EP_FN Range of_rank(int rank, int row_block) const {
    const Range rows = row_blocks.chunk(row_block), theirs = part_of(rows.end - rows.begin, rank, ranks_);
    return {rows.begin + theirs.begin, rows.begin + theirs.end};
  }

  const int rank_, ranks_;
  const bool reduce_scatter_;
};

// Every coop that may sum calls this after its last sum. Peers wait for the last coop.
template <class T>
JAX_EP_FN void conclude_reduction(Op& op, const MatmulReduceArgs& args) {
  const SummedRows rows(op.comm, args);
  op.deliver(rows.row_blocks.chunks, 1, op.coop.count);
  op.count_received_by(op.coop.index == 0, [&](int rank) {
    return rows.received_from(rank) * int64_t{args.n} * static_cast<int>(sizeof(T));
  });
}

// Waits until every rank has written its sums here and reads no more rows. Called after conclude_reduction().
JAX_EP_FN void wait_concluded(Op& op, const MatmulReduceArgs& args) {
  op.wait_delivered(SummedRows(op.comm, args).row_blocks.chunks);
}

// The first chunk from `chunk` on that is missing from some rank. Checks no more chunks than there are lanes, so it may
// stop before `end`.
JAX_EP_FN int delivered_until(const Op& op, int chunk, int end) {
  const int ranks = op.comm.size, most = smaller(end, chunk + larger(1, Coop::lanes / ranks));
  const int flags = (most - chunk) * ranks;
  int until = most;
  for (int first = 0; first < flags && until == most; first += Coop::lanes) {
    const int i = first + op.coop.lane;
    const bool missing = i < flags && !op.is_raised(&op.signal_pad->delivered[i % ranks][chunk + i / ranks]);
    if (const uint64_t missed = op.coop.ballot(missing)) until = chunk + (first + lowest_bit(missed)) / ranks;
  }
  op.coop.sync();
  return until;
}

// Constructed after Op::wait_posted().
template <class T>
class MatmulReduce {
 public:
  JAX_EP_FN MatmulReduce(Op& op, const MatmulReduceArgs& args)
      : op_(op),
        args_(args),
        rows_(op.comm, args),
        partials_(op, kWindow<&MatmulReduceArgs::partial>),
        results_(op, kWindow<&MatmulReduceArgs::result>),
        sums_(op.coop, in_words(args.partial, args.result, int64_t{args.n} * sizeof(T))) {
    const int64_t values = int64_t{args.m} * args.n / op.comm.size, batch = kSumValues<T, kPacks>;
    const int64_t batches = values / (batch * op.coop.count * kTicketsPerCoop);
    part_values_ = static_cast<int>(batch * (batches < 1 ? 1 : batches < kMaxBatches ? batches : kMaxBatches));
  }

  // Takes parts of row blocks in order, and sums each when all ranks have announced its row block.
  JAX_EP_FN void reduce() {
    const Range kept = rows_.kept;
    const int first = rows_.row_blocks.chunk_of(kept.begin);
    const int row_blocks = kept.begin < kept.end ? rows_.row_blocks.chunk_of(kept.end - 1) + 1 - first : 0;
    int ready = first;  // all row blocks before it have arrived
    for (Tickets<&SignalPad::ticket> tickets(op_); op_.may_push();) {
      const int ticket = tickets.current(), row_block = first + ticket / parts_per_row_block();
      if (row_block >= first + row_blocks) break;
      tickets.draw_ahead();
      if (row_block >= ready) {
        ready = delivered_until(op_, row_block, first + row_blocks);
        if (ready == row_block) {
          sums_.finish();  // so that the current sum does not wait
          op_.wait_delivered(row_block);
          if (!op_.ok()) break;
          ready = row_block + 1;
        }
        op_.enter(Phase::reduce);
        sums_.acquire();
      }
      sum(rows_.of(row_block), ticket % parts_per_row_block());
    }
    if (op_.may_push())
      sums_.finish();
    else
      sums_.drop();
    sums_.complete_to(sums_.puts());
  }

 private:
  // Batches are small, so that a coop has batches of many ranks in flight. Tuned with overlap_bench.
  static constexpr int kPacks = kLanePacks < 4 ? kLanePacks : 4;
  static constexpr int kTicketsPerCoop = 8;
  static constexpr int kMaxBatches = Coop::lanes == 1 ? 512 : 8;

  JAX_EP_FN int parts_per_row_block() const {
    return static_cast<int>((int64_t{rows_.most()} * args_.n + part_values_ - 1) / part_values_);
  }

  // A part is a range of values. It may span rows, which have no gaps.
  JAX_EP_FN void sum(Range rows, int part) {
    const int64_t end = int64_t{rows.end} * args_.n,
                  begin = int64_t{rows.begin} * args_.n + int64_t{part} * part_values_;
    if (begin >= end) return;
    const auto terms = terms_of<const T>(op_.coop, op_.comm.size, [&](int rank) {
      return WeightedRow<const T>{reinterpret_cast<const T*>(partials_.peer(rank)) + begin, 1.0f};
    });
    const auto sinks = terms_of<char>(op_.coop, args_.reduce_scatter ? 1 : op_.comm.size, [&](int i) {
      char* result = args_.reduce_scatter ? args_.result : results_.peer(i);
      return WeightedRow<char>{result + (begin - int64_t{rows_.kept.begin} * args_.n) * sizeof(T), 1.0f};
    });
    sums_.sum(terms, sinks, static_cast<int>(end - begin < part_values_ ? end - begin : part_values_));
  }

  Op& op_;
  const MatmulReduceArgs& args_;
  const SummedRows rows_;
  const LaneWindow<char> partials_, results_;
  RowSum<T, kPacks> sums_;
  int part_values_;
};

// On the CPU every coop multiplies and reduces.
template <class T>
JAX_EP_FN void reduce_products(Op& op, const MatmulReduceArgs& args) {
  op.post(window_addresses(args, op.comm.size));
  const RowBlocks row_blocks(args.m);
  for (int row_block = 0; row_block < row_blocks.chunks && op.may_push(); ++row_block) {
    const Range rows = row_blocks.chunk(row_block), mine = part_of(rows.end - rows.begin, op.coop.index, op.coop.count);
    const int64_t first = rows.begin + mine.begin;
    multiply_rows(args.operand_dtype, args.lhs + first * args.k * size_of(args.operand_dtype),
                  Factor{args.rhs, args.k, args.n, args.transpose_rhs},
                  reinterpret_cast<T*>(args.partial) + first * args.n, mine.end - mine.begin);
    op.deliver(row_block, 1, op.coop.count);
  }
  op.wait_posted();
  MatmulReduce<T>(op, args).reduce();
  conclude_reduction<T>(op, args);
  wait_concluded(op, args);
}

// A reduction between two ranks is one exchange. A rank stores the part of its product that it keeps in its result, and
// pushes the part that the peer keeps to the peer's landing. Then it adds the peer's part. Both ranks add the same two
// values, so their bits are equal.
constexpr int kExchangingRanks = 2;

// The places of the values of one rank's product. Rows are numbered in the whole product.
template <class T>
class MatmulExchange {
 public:
  JAX_EP_FN MatmulExchange(const Comm& comm, const MatmulReduceArgs& args)
      : peer(1 - comm.rank),
        n_(args.n),
        kept_(args.reduce_scatter ? part_of(args.m, comm.rank, kExchangingRanks) : Range{0, args.m}),
        sent_(args.reduce_scatter ? part_of(args.m, peer, kExchangingRanks) : Range{0, args.m}),
        result_(reinterpret_cast<T*>(args.result) - int64_t{kept_.begin} * args.n),
        landed_(reinterpret_cast<const T*>(args.partial)) {}

  const int peer;

  JAX_EP_FN bool keeps(int row) const { return kept_.begin <= row && row < kept_.end; }
  JAX_EP_FN bool sends(int row) const { return sent_.begin <= row && row < sent_.end; }

  // The place of a value of this rank's product, here or at the peer. landing(): called after wait_posted().
  JAX_EP_FN T* kept(int row, int column) const { return result_ + at(row, column); }
  JAX_EP_FN T* sent(T* landing, int row, int column) const { return landing + at(row, column); }
  JAX_EP_FN T* landing(const Op& op) const { return Window<T>(op, kWindow<&MatmulReduceArgs::partial>).peer(peer); }

  JAX_EP_FN void count_received(const Op& op, bool elected) const {
    op.count_received_by(elected, [&](int) { return (kept_.end - kept_.begin) * int64_t{n_} * sizeof(T); });
  }

  JAX_EP_FN void add(const Coop& coop, Range rows, Range columns) const {
    Packs packs(overlap(rows, kept_), columns, n_);
    for (int first = coop.lane; first < packs.count; first += kAhead * Coop::lanes) {
      Pack<T> own[kAhead], landed[kAhead];
      for (int i = 0; i < kAhead; ++i) {
        const PackSpan span = packs.at(first, i);
        own[i].load(result_ + span.first, span.values);
        landed[i].load(landed_ + span.first, span.values);
      }
      for (int i = 0; i < kAhead; ++i) {
        const PackSpan span = packs.at(first, i);
        sum(own[i], landed[i]).store(result_ + span.first, span.values);
      }
    }
  }

 private:
  static constexpr int kAhead = Coop::lanes == 1 ? 1 : 8;  // loads in flight of a lane, per operand

  struct PackSpan {
    int64_t first;
    int values;  // from `first` to the end of the row; 0 past the last pack
  };

  struct Packs {
    JAX_EP_FN Packs(Range rows, Range columns, int n)
        : rows(rows), columns{columns.begin, smaller(columns.end, n)}, n(n) {
      across = larger(1, (this->columns.end - columns.begin + kPackValues<T> - 1) / kPackValues<T>);
      count = rows.begin < rows.end && columns.begin < n ? (rows.end - rows.begin) * across : 0;
    }
    JAX_EP_FN PackSpan at(int first, int i) const {
      const int pack = first + i * Coop::lanes;
      if (pack >= count) return {0, 0};
      const int row = pack / across, column = columns.begin + (pack - row * across) * kPackValues<T>;
      return {int64_t{rows.begin + row} * n + column, columns.end - column};
    }
    Range rows, columns;
    int n, across, count;
  };

  JAX_EP_FN int64_t at(int row, int column) const { return int64_t{row} * n_ + column; }

  JAX_EP_FN static Pack<T> sum(const Pack<T>& a, const Pack<T>& b) {
    float left[kPackValues<T>], right[kPackValues<T>];
    to_floats(a.values, left);
    to_floats(b.values, right);
    for (int i = 0; i < kPackValues<T>; ++i) left[i] += right[i];
    Pack<T> sum;
    from_floats(left, sum.values);
    return sum;
  }

  const int n_;
  const Range kept_, sent_;
  T* const result_;
  const T* const landed_;
};

// On the CPU every coop multiplies, exchanges, and adds to the rows that it multiplied.
template <class T>
JAX_EP_FN void exchange_products(Op& op, const MatmulReduceArgs& args) {
  const MatmulExchange<T> exchange(op.comm, args);
  op.post(window_addresses(args, op.comm.size));
  exchange.count_received(op, op.coop.index == 0);
  op.wait_posted();
  const RowBlocks row_blocks(args.m);
  const auto own_rows = [&](int row_block) {
    const Range rows = row_blocks.chunk(row_block), mine = part_of(rows.end - rows.begin, op.coop.index, op.coop.count);
    return Range{rows.begin + mine.begin, rows.begin + mine.end};
  };
  for (int row_block = 0; row_block < row_blocks.chunks && op.may_push(); ++row_block) {
    const Range rows = own_rows(row_block);
    for (int row = rows.begin; row < rows.end; ++row) {
      T* const sent = exchange.sent(exchange.landing(op), row, 0);
      T* const kept = exchange.keeps(row) ? exchange.kept(row, 0) : sent;
      multiply_rows(args.operand_dtype, args.lhs + int64_t{row} * args.k * size_of(args.operand_dtype),
                    Factor{args.rhs, args.k, args.n, args.transpose_rhs}, kept, 1);
      if (kept != sent && exchange.sends(row))
        copy_row(op.coop, reinterpret_cast<char*>(sent), reinterpret_cast<const char*>(kept), args.n * sizeof(T));
    }
    op.deliver(row_block, 1, op.coop.count);
  }
  for (int row_block = 0; row_block < row_blocks.chunks && op.ok(); ++row_block) {
    op.wait_delivered(exchange.peer, row_block);
    if (op.ok()) exchange.add(op.coop, own_rows(row_block), {0, args.n});
  }
}

template <class T>
JAX_EP_FN void run_kernel(const Comm& comm, const MatmulReduceArgs& args, const Coop& coop) {
  Op op(comm, coop, kind_of(args));
  const Results<MatmulReduceArgs> results(args, comm.size);
  op.poison(results);
  if (comm.size == kExchangingRanks)
    exchange_products<T>(op, args);
  else
    reduce_products<T>(op, args);
  op.finish(results);
}

}  // namespace jax_ep
