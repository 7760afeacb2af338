// matmul_all_reduce and matmul_reduce_scatter of two ranks: one exchange. A rank leaves what it keeps of its product in
// its result, and pushes what the peer keeps to where it lands there. When the peer's is here, it is added: both ranks
// add the same two values, which gives the same bits in either order.
#pragma once

#include "comm/op.h"
#include "kernels/matmul/args.h"
#include "kernels/matmul/product.h"
#include "rows/piece.h"

namespace jax_ep {

constexpr int kExchangingRanks = 2;

// What becomes of one rank's product. Rows count from the first of the whole product.
template <class T>
class MatmulExchange {
 public:
  JAX_EP_FN MatmulExchange(const Comm& comm, const MatmulReduceArgs& args)
      : peer(1 - comm.rank),
        n_(args.n),
        kept_(args.scatter ? share(args.m, comm.rank, kExchangingRanks) : Range{0, args.m}),
        sent_(args.scatter ? share(args.m, peer, kExchangingRanks) : Range{0, args.m}),
        result_(reinterpret_cast<T*>(args.result) - int64_t{kept_.begin} * args.n),
        landed_(reinterpret_cast<const T*>(args.partial)) {}

  const int peer;

  JAX_EP_FN bool keeps(int row) const { return kept_.begin <= row && row < kept_.end; }
  JAX_EP_FN bool sends(int row) const { return sent_.begin <= row && row < sent_.end; }

  // Where a value of this rank's product belongs, here and at the peer, which has said where the first one lands.
  JAX_EP_FN T* kept(int row, int column) const { return result_ + at(row, column); }
  JAX_EP_FN T* sent(T* landing, int row, int column) const { return landing + at(row, column); }
  JAX_EP_FN T* landing(const Op& op) const { return static_cast<T*>(op.mail_from(peer)->buffers[0]); }

  // One team of the rank is the `counter`.
  JAX_EP_FN void count_received(const Op& op, bool counter) const {
    op.count_received_by(counter, [&](int) { return (kept_.end - kept_.begin) * int64_t{n_} * sizeof(T); });
  }

  // Adds what has landed of some rows and columns.
  JAX_EP_FN void add(const Team& team, Range rows, Range columns) const {
    Pieces pieces(overlap(rows, kept_), columns, n_);
    for (int first = team.lane; first < pieces.count; first += kAhead * Team::lanes) {
      Piece<T> here[kAhead], there[kAhead];
      for (int i = 0; i < kAhead; ++i) {
        const PiecePlace place = pieces.at(first, i);
        here[i].load(result_ + place.first, place.values);
        there[i].load(landed_ + place.first, place.values);
      }
      for (int i = 0; i < kAhead; ++i) {
        const PiecePlace place = pieces.at(first, i);
        sum(here[i], there[i]).store(result_ + place.first, place.values);
      }
    }
  }

 private:
  static constexpr int kAhead = Team::lanes == 1 ? 1 : 8;  // loads of a lane under way, of each operand

  struct PiecePlace {
    int64_t first;
    int values;  // that are left of the row from here on; none outside
  };

  // Some rows and columns, cut into pieces.
  struct Pieces {
    JAX_EP_FN Pieces(Range rows, Range columns, int n)
        : rows(rows), columns{columns.begin, smaller(columns.end, n)}, n(n) {
      across = larger(1, (this->columns.end - columns.begin + kPieceValues<T> - 1) / kPieceValues<T>);
      count = rows.begin < rows.end && columns.begin < n ? (rows.end - rows.begin) * across : 0;
    }
    JAX_EP_FN PiecePlace at(int first, int i) const {
      const int piece = first + i * Team::lanes;
      if (piece >= count) return {0, 0};
      const int row = piece / across, column = columns.begin + (piece - row * across) * kPieceValues<T>;
      return {int64_t{rows.begin + row} * n + column, columns.end - column};
    }
    Range rows, columns;
    int n, across, count;
  };

  JAX_EP_FN int64_t at(int row, int column) const { return int64_t{row} * n_ + column; }

  JAX_EP_FN static Piece<T> sum(const Piece<T>& here, const Piece<T>& there) {
    float left[kPieceValues<T>], right[kPieceValues<T>];
    to_floats(here.values, left);
    to_floats(there.values, right);
    for (int i = 0; i < kPieceValues<T>; ++i) left[i] += right[i];
    Piece<T> sum;
    from_floats(left, sum.values);
    return sum;
  }

  const int n_;
  const Range kept_, sent_;
  T* const result_;
  const T* const landed_;
};

// Where a rank's product is computed by the very teams that exchange it: each adds to the rows that it multiplied.
template <class T>
JAX_EP_FN void exchange_products(Op& op, const MatmulReduceArgs& args) {
  const MatmulExchange<T> exchange(op.comm, args);
  op.post(args.partial);
  exchange.count_received(op, op.team.index == 0);
  op.wait_posted();
  const RowBlocks blocks(args.m);
  const auto own_rows = [&](int block) {
    const Range rows = blocks.chunk(block), mine = share(rows.end - rows.begin, op.team.index, op.team.count);
    return Range{rows.begin + mine.begin, rows.begin + mine.end};
  };
  for (int block = 0; block < blocks.chunks && op.may_push(); ++block) {
    const Range rows = own_rows(block);
    for (int row = rows.begin; row < rows.end; ++row) {
      T* const sent = exchange.sent(exchange.landing(op), row, 0);
      T* const kept = exchange.keeps(row) ? exchange.kept(row, 0) : sent;
      multiply_rows(args.operand_dtype, args.a + int64_t{row} * args.k * size_of(args.operand_dtype),
                    Factor{args.b, args.k, args.n, args.transpose_b}, kept, 1);
      if (kept != sent && exchange.sends(row))
        copy_row(op.team, reinterpret_cast<char*>(sent), reinterpret_cast<const char*>(kept), args.n * sizeof(T));
    }
    op.deliver(block, 1, op.team.count);
  }
  for (int block = 0; block < blocks.chunks && op.ok(); ++block) {
    op.wait_delivered(exchange.peer, block);
    if (op.ok()) exchange.add(op.team, own_rows(block), {0, args.n});
  }
}

}  // namespace jax_ep
