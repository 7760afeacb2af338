// Where a rank is among the ops across nodes. XLA's collectives between nodes tell nobody.
#pragma once

#include <cstdint>

#include "comm/platform.h"

namespace jax_ep {

// In host memory, also where kernels write it.
struct Marks {
  uint64_t begun;  // ops
  uint64_t ended;  // of the ops begun, the number of the last one that has ended
  uint64_t call;   // the one that was begun last, by the number of its text
};

// Marks the beginning of a call, or the end of all that have begun. A backward pass that computes the operands of a
// call again may begin the call without ending it, or XLA may merge two beginnings. Marks of a rank follow each other.
// The host may read meanwhile.
JAX_EP_FN void set_mark(Marks* marks, bool begins, int32_t call) {
  const uint64_t begun = load_relaxed(&marks->begun);
  if (!begins) return store_release(&marks->ended, begun);
  store_relaxed(&marks->call, static_cast<uint64_t>(call));
  store_release(&marks->begun, begun + 1);
}

}  // namespace jax_ep
