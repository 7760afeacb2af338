// How rows move, each as fast as the platform can.
//
// RowMover: from memory to memory.
//   move(next, bytes, fanout, source, sink, after): for every i that next() gives, until -1, copies the `bytes` at
//     source(i) to the up to `fanout` addresses sink(i, k), then calls after(i, mover). Null sources and sinks move
//     nothing. All lanes call together, each sink with a k of its own, and sink(i, k) right after source(i).
//   acquire(): from here on, move() may read what a flag has announced. next() may call it.
//   puts(), complete_to(puts): as in RowWriter.
//
// RowReader: from memory to shared memory, in batches that are requested ahead of time.
//   in_bulk(): whether this reader does so; depth(): how many batches may be under way or in use.
//   acquire(): from here on, ask() may request what a flag has announced.
//   ask(mine, count, from, bytes): `count` batches, of which this lane's `mine`-th is at its own address; lanes with
//     other numbers have none.
//   take(): where the oldest batch is now; release(): the caller has read all batches that it took.
//
// RowWriter: from registers to memory.
//   put(sinks, offset, bytes, fill): a batch of `bytes` at `offset` from each of `sinks`. Every lane writes
//     its part by fill(to). put_directly(...) does the same for batches that are not made of 16-byte words.
//   put() by hand, if rows come in bulk: stage(true) is where the next batch is made, stage(false) is the same place
//     again; then seal(), send(sinks, offset, bytes, from) for each part of the batch, and commit().
//   puts(): how many batches were put. complete_to(puts): returns when these are written, so a flag may announce them.
#pragma once

#include "comm/platform.h"
namespace jax_ep {

// A coop's shared memory, where rows come in bulk, begins with barriers.
constexpr int kBarrierBytes = 128;

// begin, begin + step, ... below end, then -1.
struct Stride {
  int begin, end, step;

  JAX_EP_FN int next() {
    const int i = begin;
    begin += step;
    return i < end ? i : -1;
  }
};

}  // namespace jax_ep

#if JAX_EP_HAS_PTX
#include "rows/movers/bulk.h"

namespace jax_ep {
using RowMover = BulkMover;
using RowReader = BulkReader;
using RowWriter = BulkWriter;
}  // namespace jax_ep
#else
#include "rows/movers/plain.h"

namespace jax_ep {
using RowMover = PlainMover;
using RowReader = PlainReader;
using RowWriter = PlainWriter;
}  // namespace jax_ep
#endif
