// RowMover moves rows from memory to memory, RowWriter writes rows that a team makes in registers, each as fast as the
// target can.
//
// RowMover:
//   move(places, bytes, fanout, source, sink, after): for every i of `places`, copies the `bytes` at source(i) to the
//     up to `fanout` addresses sink(i, k), then calls after(i, mover). Null sources and sinks move nothing. All lanes
//     call together, each sink with a k of its own, and sink(i, k) right after source(i).
//   publish(): what this team has just written may be a source.
//   complete(pending): returns when all rows but the `pending` latest are written, so that a flag may announce them.
#pragma once

#include "device/platform.h"

namespace jax_ep {

// begin, begin + step, ... below end.
struct Stride {
  int begin, end, step;
};

}  // namespace jax_ep

#include JAX_EP_MOVER
#include JAX_EP_WRITER
