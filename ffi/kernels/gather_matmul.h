// all_gather_matmul: every rank pushes its rows to all, announced block by block; products of blocks that are here run
// meanwhile, those of this rank's own rows first.
#pragma once

#include "device/rows.h"
#include "kernels/announcer.h"
#include "kernels/matmul_args.h"
#include "kernels/op.h"
#include "kernels/peer_buffer.h"
#include "kernels/product.h"
#include "kernels/row_blocks.h"

namespace jax_ep {

// Every row is moved twice before it is announced: to all peers, and to its place here.
constexpr int kMoves = 2;

// Moves the rows of this rank that next() counts to `gathered` of `fanout` ranks from `rank` on. Where they do not end
// with a pair of blocks, some tiles reach over the end, and want the last block as early as the first: it goes first.
template <class Mover, class Next>
JAX_EP_FN void spread_rows(Op& op, const GatherMatmulArgs& args, Mover& mover, int rank, int fanout, Next next) {
  op.enter(Phase::send);
  const RowBlocks blocks(args.m);
  const int first = args.m % (2 * kBlockRows) ? blocks.chunk(blocks.chunks - 1).begin : 0;
  const int64_t bytes = int64_t{args.k} * size_of(args.operand_dtype), place = int64_t{op.comm.rank} * args.m;
  Announcer announcer(op, blocks, kMoves);
  const PeerBuffer gathered(op, 0);
  const auto row = [&](int i) { return i + first < args.m ? i + first : i + first - args.m; };
  const auto source = [&](int i) -> const char* { return op.may_push() ? args.a + row(i) * bytes : nullptr; };
  const auto sink = [&](int i, int k) -> char* {
    char* const to = gathered.of(k < fanout ? (rank + k) % op.comm.size : -1);
    return to ? to + (place + row(i)) * bytes : nullptr;
  };
  const auto after = [&](int i, auto& rows) { announcer.after(row(i), rows); };
  mover.move(next, bytes, fanout, source, sink, after);
  announcer.finish(mover);
}

// This rank's rows to their place in everybody else's `gathered`.
JAX_EP_FN void push_rows(Op& op, const GatherMatmulArgs& args) {
  if (!op.ok() || op.team.pusher.index < 0) return;
  PushItems items(op, args.m);
  RowMover mover(op.team);
  spread_rows(op, args, mover, op.comm.rank + 1, op.comm.size - 1, [&] { return items.next(); });
}

// The same here, through registers: what bulk copies a processor can have under way is for the wire.
JAX_EP_FN void keep_rows(Op& op, const GatherMatmulArgs& args) {
  if (!op.ok() || op.team.filler.index < 0) return;
  Stride items{op.team.filler.index, args.m, op.team.filler.count};
  PlainMover mover(op.team);
  spread_rows(op, args, mover, op.comm.rank, 1, [&] { return items.next(); });
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
  const int total = args.m * comm.size;
  const int64_t row_bytes = int64_t{args.k} * size_of(args.operand_dtype);
  const Buffer results[] = {{args.result, int64_t{total} * args.n * size_of(args.dtype)},
                            {args.gathered, total * row_bytes}};
  op.poison(results);
  op.post(args.gathered);
  op.wait_posted();
  push_rows(op, args);
  keep_rows(op, args);
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
