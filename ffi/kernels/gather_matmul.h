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

// This rank's rows to their place in everybody's `gathered`.
JAX_EP_FN void push_rows(Op& op, const GatherMatmulArgs& args) {
  if (!op.ok() || op.team.pusher.index < 0) return;
  op.enter(Phase::send);
  const RowBlocks blocks(args.m);
  const int64_t bytes = int64_t{args.k} * size_of(args.operand_dtype), place = int64_t{op.comm.rank} * args.m;
  Announcer announcer(op, blocks);
  PushItems items(op, args.m);
  const PeerBuffer gathered(op, 0);
  RowMover mover(op.team);
  const auto source = [&](int row) -> const char* { return op.may_push() ? args.a + row * bytes : nullptr; };
  const auto sink = [&](int row, int k) -> char* {
    char* const to = gathered.of(k < op.comm.size ? (op.comm.rank + k) % op.comm.size : -1);
    return to ? to + (place + row) * bytes : nullptr;
  };
  const auto after = [&](int row, auto& rows) { announcer.after(row, rows); };
  mover.move([&] { return items.next(); }, bytes, op.comm.size, source, sink, after);
  announcer.finish(mover);
}

// Waits until the rows [begin, end) of all ranks' are here.
JAX_EP_FN void wait_rows(Op& op, const GatherMatmulArgs& args, Range rows) {
  const RowBlocks blocks(args.m);
  for (int row = rows.begin; row < rows.end && op.ok();) {
    const int source = row / args.m, block = blocks.chunk_of(row % args.m);
    op.wait_delivered(source, block);
    row = source * args.m + blocks.chunk(block).end;
  }
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
