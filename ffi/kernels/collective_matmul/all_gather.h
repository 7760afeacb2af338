// all_gather_matmul: every rank pushes its rows to all ranks and announces them row block by row block. Products of row
// blocks that have arrived run at the same time, beginning with this rank's own rows.
#pragma once

#include "comm/copy.h"
#include "comm/op.h"
#include "comm/push.h"
#include "comm/window.h"
#include "kernels/collective_matmul/args.h"
#include "rows/movers.h"
#include "rows/plain_matmul.h"

namespace jax_ep {

// The parts of this rank's rows that coops push: ranges of bytes, each of one row block. If the rows end inside a pair
// of row blocks, some tiles also have rows of the next rank. For these tiles peers need the last row block early, so it
// is pushed first.
class RowParts {
 public:
  const int chunks;  // row blocks

  JAX_EP_FN RowParts(int rows, int64_t row_bytes, int coops)
      : chunks(RowBlocks(rows).chunks),
        row_blocks_(rows),
        row_bytes_(row_bytes),
        part_bytes_(part_bytes(rows * row_bytes / coops)),
        per_row_block_(parts_of(row_blocks_.block_rows)),
        count_(rows > 0 ? (chunks - 1) * per_row_block_ + parts_of(rows - (chunks - 1) * row_blocks_.block_rows) : 0),
        first_(rows > 0 && rows % (2 * kBlockRows) ? (chunks - 1) * per_row_block_ : 0) {}

  JAX_EP_FN int count() const { return count_; }
  JAX_EP_FN int at(int i) const { return i + first_ < count_ ? i + first_ : i + first_ - count_; }
  JAX_EP_FN int chunk_of(int part) const { return part / per_row_block_; }
  JAX_EP_FN Range chunk(int index) const {
    return {index * per_row_block_, smaller((index + 1) * per_row_block_, count_)};
  }
  JAX_EP_FN Range rows(int part) const { return row_blocks_.chunk(chunk_of(part)); }
  // The part's bytes among all rows.
  JAX_EP_FN int64_t begin(int part) const {
    return rows(part).begin * row_bytes_ + int64_t{part % per_row_block_} * part_bytes_;
  }
  JAX_EP_FN int64_t size(int part) const {
    const int64_t left = rows(part).end * row_bytes_ - begin(part);
    return left < part_bytes_ ? left : part_bytes_;
  }

 private:
  // Two batches, or one if there are too few parts for all coops.
  JAX_EP_FN static int part_bytes(int64_t bytes_per_coop) {
    if (Coop::lanes == 1) return 1 << 16;
    return bytes_per_coop < 4 * Batch::kBytes ? Batch::kBytes : 2 * Batch::kBytes;
  }
  JAX_EP_FN int parts_of(int rows) const {
    return static_cast<int>((rows * row_bytes_ + part_bytes_ - 1) / part_bytes_);
  }

  const RowBlocks row_blocks_;
  const int64_t row_bytes_;
  const int part_bytes_, per_row_block_, count_, first_;
};

// Pushes this rank's rows into `gathered` of every rank. Coops take parts by ticket.
JAX_EP_FN void push_rows(Op& op, const AllGatherMatmulArgs& args) {
  const int64_t row_bytes = int64_t{args.k} * size_of(args.operand_dtype), base = op.comm.rank * args.m * row_bytes;
  const RowParts parts(args.m, row_bytes, op.coop.count);
  PushItems items(op, parts.count());
  op.wait_posted();
  if (!op.ok()) return;
  op.count_received_by(op.coop.index == 0, [&](int) { return args.m * row_bytes; });
  op.enter(Phase::send);
  const LaneWindow<char> gathered(op, kWindow<&AllGatherMatmulArgs::gathered>);
  Announcer announcer(op, parts);
  PlainMover mover(op.coop);
  for (int i = items.next(); i >= 0 && op.may_push(); i = items.next()) {
    const int part = parts.at(i);
    const int64_t begin = parts.begin(part);
    const auto to = [&](int k) { return gathered.peer((op.comm.rank + 1 + k) % op.comm.size) + base + begin; };
    copy_to_each(op.coop, op.comm.size, to, args.lhs + begin, parts.size(part));
    op.coop.sync();
    announcer.after(part, mover);
  }
  announcer.finish(mover);
}

// Waits for `rows`, numbered over all ranks. All lanes call, and each waits for one row block.
JAX_EP_FN void wait_rows(Op& op, const AllGatherMatmulArgs& args, Range rows) {
  const RowBlocks row_blocks(args.m);
  const auto index = [&](int row) { return row / args.m * row_blocks.chunks + row_blocks.chunk_of(row % args.m); };
  const int first = index(rows.begin);
  if (rows.begin < rows.end) op.wait_delivered_from(first, index(rows.end - 1) + 1 - first, row_blocks.chunks);
}

// On the CPU every coop pushes and multiplies.
template <class T>
JAX_EP_FN void run_kernel(const Comm& comm, const AllGatherMatmulArgs& args, const Coop& coop) {
  Op op(comm, coop, kind_of(args));
  const int64_t row_bytes = int64_t{args.k} * size_of(args.operand_dtype);
  const Results<AllGatherMatmulArgs> results(args, comm.size);
  op.poison(results);
  op.post(window_addresses(args, comm.size));
  push_rows(op, args);
  const RowBlocks row_blocks(args.m);
  for (int i = 0; i < comm.size * row_blocks.chunks && op.ok(); ++i) {
    const int source = (comm.rank + i / row_blocks.chunks) % comm.size;
    const Range rows = row_blocks.chunk(i % row_blocks.chunks),
                mine = part_of(rows.end - rows.begin, coop.index, coop.count);
    const int first = source * args.m + rows.begin + mine.begin, count = mine.end - mine.begin;
    wait_rows(op, args, {first, first + count});
    if (!op.ok()) break;
    multiply_rows(args.operand_dtype, args.gathered + first * row_bytes,
                  Factor{args.rhs, args.k, args.n, args.transpose_rhs},
                  reinterpret_cast<T*>(args.result) + int64_t{first} * args.n, count);
  }
  op.finish(results);
}

}  // namespace jax_ep
