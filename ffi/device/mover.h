// RowMover: moves rows one after another, as fast as the target can.
//
//   move(places, bytes, source, sinks, after): for every i of `places`, copies the `bytes` at source(i) to every
//     address that sinks(i, put) hands to put, then calls after(i, mover). A null source moves nothing. The callbacks
//     may run on one lane or on all.
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
