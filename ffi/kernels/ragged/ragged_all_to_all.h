// ragged_all_to_all: every rank writes slices of its rows into the outputs of its peers.
#pragma once

#include "comm/ctas.h"
#include "comm/op.h"
#include "comm/window.h"
#include "kernels/ragged/args.h"
#include "rows/movers.h"

namespace jax_ep {

JAX_EP_FN bool inside(int64_t begin, int64_t size, int64_t rows) {
  return begin >= 0 && size >= 0 && begin + size <= rows;
}

// Whether a slice must be sent: it is neither empty nor out of bounds. Reports a slice out of bounds.
JAX_EP_FN bool check_slice(Op& op, const RaggedArgs& args, int peer, int index) {
  const int64_t size = args.send_sizes[index], from = args.input_offsets[index], to = args.output_offsets[index];
  if (size == 0) return false;
  const bool sendable = inside(from, size, args.operand_rows);
  if (sendable && inside(to, size, args.output_rows)) return true;
  if (op.coop.lane == 0)
    op.report_invalid(peer, 0, sendable ? args.output_rows : args.operand_rows, (sendable ? to : from) + size);
  op.refuse();  // because the peer waits for the slice
  return false;
}

JAX_EP_FN void push_slices(Op& op, const RaggedArgs& args) {
  if (op.coop.sender.empty()) return;
  op.enter(Phase::send);
  RowMover mover(op.coop);
  const Window<char> outputs(op, kWindow<&RaggedArgs::output>);
  for (int i = 0; op.ok() && i < op.comm.size * args.slices; ++i) {
    const int shifted = (op.comm.rank + 1) * args.slices + i;  // every rank begins with another peer
    const int index = shifted % (op.comm.size * args.slices), peer = index / args.slices;
    if (!check_slice(op, args, peer, index)) continue;
    const char* from = args.operand + args.input_offsets[index] * args.row_bytes;
    char* to = outputs.peer(peer) + args.output_offsets[index] * args.row_bytes;
    const auto source = [&](int row) -> const char* { return op.may_push() ? from + row * args.row_bytes : nullptr; };
    Stride rows{op.coop.sender.index, args.send_sizes[index], op.coop.sender.count};
    const auto sink = [&](int row, int k) { return k == 0 ? to + row * args.row_bytes : nullptr; };
    mover.move([&] { return rows.next(); }, args.row_bytes, 1, source, sink, [](int, auto&) {});
  }
  mover.complete_to(mover.puts());
  op.deliver(0, 1, op.coop.sender.count);
}

// Checks that peers send what this rank expects to receive.
JAX_EP_FN void check_sizes(Op& op, const RaggedArgs& args) {
  if (!op.ok() || op.coop.index != 0) return;
  const ReceivedMail mail(op);
  for (int i = op.coop.lane; i < op.comm.size * args.slices; i += Coop::lanes) {
    const int source = i / args.slices, sent = mail.ints(source)[i % args.slices];
    if (sent == args.recv_sizes[i])
      op.count_received(source, larger(0, sent) * args.row_bytes);
    else
      op.report_invalid(source, 0, args.recv_sizes[i], sent);
  }
}

JAX_EP_FN void exchange_slices(Op& op, const RaggedArgs& args) {
  if (op.ok() && op.coop.index == 0)
    for (int i = op.coop.lane; i < op.comm.size * args.slices; i += Coop::lanes)
      SentMail(op).ints(i / args.slices)[i % args.slices] = args.send_sizes[i];
  op.post(window_addresses(args, op.comm.size));
  op.wait_posted();
  check_sizes(op, args);
  push_slices(op, args);
  op.wait_delivered(0);
}

template <class = NoFormat>
JAX_EP_FN void run_kernel(const Comm& comm, const RaggedArgs& args, const Coop& all) {
  const Coop coop = join_op(comm, all);
  Op op(comm, coop, kind_of(args));
  if (!coop.cta.empty()) exchange_slices(op, args);
  const Results<RaggedArgs> results(args, comm.size);
  op.finish(results, all.count);
}

}  // namespace jax_ep
