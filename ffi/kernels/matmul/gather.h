// all_gather_matmul: every rank pushes its rows to all, announced block by block; products of blocks that are here run
// meanwhile, those of this rank's own rows first.
#pragma once

#include "comm/copy.h"
#include "comm/op.h"
#include "comm/push.h"
#include "kernels/matmul/args.h"
#include "kernels/matmul/product.h"
#include "kernels/results.h"
#include "rows/movers.h"

namespace jax_ep {

// What a team moves at a time: a piece of a block of this rank's rows, whose bytes lie one behind the other. Where the
// rows do not end with a pair of blocks, some tiles reach over the end, and want the last block as early as the first:
// it goes first.
class RowPieces {
 public:
  const int chunks;  // blocks of rows

  JAX_EP_FN RowPieces(int rows, int64_t row_bytes, int teams)
      : chunks(RowBlocks(rows).chunks),
        blocks_(rows),
        row_bytes_(row_bytes),
        piece_bytes_(piece_bytes(rows * row_bytes / teams)),
        per_block_(pieces_of(blocks_.block_rows)),
        count_(rows > 0 ? (chunks - 1) * per_block_ + pieces_of(rows - (chunks - 1) * blocks_.block_rows) : 0),
        first_(rows > 0 && rows % (2 * kBlockRows) ? (chunks - 1) * per_block_ : 0) {}

  JAX_EP_FN int count() const { return count_; }
  // The piece that is the i-th to be moved.
  JAX_EP_FN int at(int i) const { return i + first_ < count_ ? i + first_ : i + first_ - count_; }
  JAX_EP_FN int chunk_of(int piece) const { return piece / per_block_; }
  JAX_EP_FN Range chunk(int index) const { return {index * per_block_, smaller((index + 1) * per_block_, count_)}; }
  JAX_EP_FN Range rows(int piece) const { return blocks_.chunk(chunk_of(piece)); }
  // Its bytes among those of all rows.
  JAX_EP_FN int64_t begin(int piece) const {
    return rows(piece).begin * row_bytes_ + int64_t{piece % per_block_} * piece_bytes_;
  }
  JAX_EP_FN int64_t size(int piece) const {
    const int64_t left = rows(piece).end * row_bytes_ - begin(piece);
    return left < piece_bytes_ ? left : piece_bytes_;
  }

 private:
  // Two batches, or one where there would not be enough for all teams.
  JAX_EP_FN static int piece_bytes(int64_t bytes_per_team) {
    if (Team::lanes == 1) return 1 << 16;
    return bytes_per_team < 4 * Batch::kBytes ? Batch::kBytes : 2 * Batch::kBytes;
  }
  JAX_EP_FN int pieces_of(int rows) const {
    return static_cast<int>((rows * row_bytes_ + piece_bytes_ - 1) / piece_bytes_);
  }

  const RowBlocks blocks_;
  const int64_t row_bytes_;
  const int piece_bytes_, per_block_, count_, first_;
};

// This rank's rows to their place in everybody's `gathered`, this rank's too, by whichever teams are free.
JAX_EP_FN void spread_rows(Op& op, const GatherMatmulArgs& args) {
  const int64_t row_bytes = int64_t{args.k} * size_of(args.operand_dtype), place = op.comm.rank * args.m * row_bytes;
  const RowPieces pieces(args.m, row_bytes, op.team.count);
  PushItems items(op, pieces.count());
  op.wait_posted();
  if (!op.ok()) return;
  op.count_received_by(op.team.index == 0, [&](int) { return args.m * row_bytes; });
  op.enter(Phase::send);
  const PeerBuffer gathered(op, 0);
  Announcer announcer(op, pieces);
  PlainMover mover(op.team);
  for (int i = items.next(); i >= 0 && op.may_push(); i = items.next()) {
    const int piece = pieces.at(i);
    const int64_t begin = pieces.begin(piece);
    const auto to = [&](int k) { return gathered.of((op.comm.rank + 1 + k) % op.comm.size) + place + begin; };
    copy_to_each(op.team, op.comm.size, to, args.a + begin, pieces.size(piece));
    op.team.sync();
    announcer.after(piece, mover);
  }
  announcer.finish(mover);
}

// Waits until the rows [begin, end) of all ranks' are here: each lane for a block of them.
JAX_EP_FN void wait_rows(Op& op, const GatherMatmulArgs& args, Range rows) {
  const RowBlocks blocks(args.m);
  const auto index = [&](int row) { return row / args.m * blocks.chunks + blocks.chunk_of(row % args.m); };
  const int first = index(rows.begin);
  if (rows.begin < rows.end) op.wait_delivered_from(first, index(rows.end - 1) + 1 - first, blocks.chunks);
}

// Where the product is computed by the very teams that push.
template <class T>
JAX_EP_FN void run_kernel(const Comm& comm, const GatherMatmulArgs& args, const Team& team) {
  Op op(comm, team, kind_of(args));
  const int64_t row_bytes = int64_t{args.k} * size_of(args.operand_dtype);
  const Results<GatherMatmulArgs> results(args, comm.size);
  op.poison(results);
  op.post(args.gathered);
  spread_rows(op, args);
  const RowBlocks blocks(args.m);
  for (int i = 0; i < comm.size * blocks.chunks && op.ok(); ++i) {
    const int source = (comm.rank + i / blocks.chunks) % comm.size;
    const Range rows = blocks.chunk(i % blocks.chunks), mine = share(rows.end - rows.begin, team.index, team.count);
    const int first = source * args.m + rows.begin + mine.begin, count = mine.end - mine.begin;
    wait_rows(op, args, {first, first + count});
    if (!op.ok()) break;
    multiply_rows(args.operand_dtype, args.gathered + first * row_bytes,
                  Factor{args.b, args.k, args.n, args.transpose_b},
                  reinterpret_cast<T*>(args.result) + int64_t{first} * args.n, count);
  }
  op.finish(results);
}

}  // namespace jax_ep
