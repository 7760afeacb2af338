// matmul_all_reduce and matmul_reduce_scatter of two ranks: one exchange. A rank leaves what it keeps of its product in
// its result, and pushes what the peer keeps to where it lands there. When the peer's is here, it is added: both ranks
// add the same two values, which gives the same bits in either order.
#pragma once

#include "comm/op.h"
#include "kernels/matmul/args.h"
#include "kernels/matmul/row_blocks.h"
#include "kernels/op_buffers.h"
#include "kernels/plain_product.h"
#include "rows/pack.h"

namespace jax_ep {

constexpr int kExchangingRanks = 2;

// What becomes of one rank's product. Rows count from the first of the whole product.
template <class T>
class MatmulExchange {
 public:
  JAX_EP_FN MatmulExchange(const Comm& comm, const MatmulReduceArgs& args)
      : peer(1 - comm.rank),
        n_(args.n),
        kept_(args.reduce_scatter ? share(args.m, comm.rank, kExchangingRanks) : Range{0, args.m}),
        sent_(args.reduce_scatter ? share(args.m, peer, kExchangingRanks) : Range{0, args.m}),
        result_(reinterpret_cast<T*>(args.result) - int64_t{kept_.begin} * args.n),
        landed_(reinterpret_cast<const T*>(args.partial)) {}

  const int peer;

  JAX_EP_FN bool keeps(int row) const { return kept_.begin <= row && row < kept_.end; }
  JAX_EP_FN bool sends(int row) const { return sent_.begin <= row && row < sent_.end; }

  // Where a value of this rank's product belongs, here and at the peer, which has said where the first one lands.
  JAX_EP_FN T* kept(int row, int column) const { return result_ + at(row, column); }
  JAX_EP_FN T* sent(T* landing, int row, int column) const { return landing + at(row, column); }
  JAX_EP_FN T* landing(const Op& op) const { return Window<T>(op, kWindow<&MatmulReduceArgs::partial>).peer(peer); }

  // One coop of the rank is the `counter`.
  JAX_EP_FN void count_received(const Op& op, bool counter) const {
    op.count_received_by(counter, [&](int) { return (kept_.end - kept_.begin) * int64_t{n_} * sizeof(T); });
  }

  // Adds what has landed of some rows and columns.
  JAX_EP_FN void add(const Coop& coop, Range rows, Range columns) const {
    Packs packs(overlap(rows, kept_), columns, n_);
    for (int first = coop.lane; first < packs.count; first += kAhead * Coop::lanes) {
      Pack<T> here[kAhead], there[kAhead];
      for (int i = 0; i < kAhead; ++i) {
        const PackSpan span = packs.at(first, i);
        here[i].load(result_ + span.first, span.values);
        there[i].load(landed_ + span.first, span.values);
      }
      for (int i = 0; i < kAhead; ++i) {
        const PackSpan span = packs.at(first, i);
        sum(here[i], there[i]).store(result_ + span.first, span.values);
      }
    }
  }

 private:
  static constexpr int kAhead = Coop::lanes == 1 ? 1 : 8;  // loads of a lane under way, of each operand

  struct PackSpan {
    int64_t first;
    int values;  // that are left of the row from here on; none outside
  };

  // Some rows and columns, cut into packs.
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

  JAX_EP_FN static Pack<T> sum(const Pack<T>& here, const Pack<T>& there) {
    float left[kPackValues<T>], right[kPackValues<T>];
    to_floats(here.values, left);
    to_floats(there.values, right);
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

// Where a rank's product is computed by the very coops that exchange it: each adds to the rows that it multiplied.
template <class T>
JAX_EP_FN void exchange_products(Op& op, const MatmulReduceArgs& args) {
  const MatmulExchange<T> exchange(op.comm, args);
  op.post(posted(args, op.comm.size));
  exchange.count_received(op, op.coop.index == 0);
  op.wait_posted();
  const RowBlocks row_blocks(args.m);
  const auto own_rows = [&](int row_block) {
    const Range rows = row_blocks.chunk(row_block), mine = share(rows.end - rows.begin, op.coop.index, op.coop.count);
    return Range{rows.begin + mine.begin, rows.begin + mine.end};
  };
  for (int row_block = 0; row_block < row_blocks.chunks && op.may_push(); ++row_block) {
    const Range rows = own_rows(row_block);
    for (int row = rows.begin; row < rows.end; ++row) {
      T* const sent = exchange.sent(exchange.landing(op), row, 0);
      T* const kept = exchange.keeps(row) ? exchange.kept(row, 0) : sent;
      multiply_rows(args.operand_dtype, args.a + int64_t{row} * args.k * size_of(args.operand_dtype),
                    Factor{args.b, args.k, args.n, args.transpose_b}, kept, 1);
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

}  // namespace jax_ep
