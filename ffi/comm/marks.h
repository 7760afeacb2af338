// How far a rank has come in the ops across nodes. XLA's collectives between nodes do not report it.
#pragma once

#include <cstdint>

#include "comm/platform.h"

namespace jax_ep {

// In host memory, even if kernels write it.
struct Marks {
  uint64_t begun;  // ops
  uint64_t ended;  // the number of the last op that has ended
  uint64_t call;   // number of the text of the op begun last
};

// Marks the beginning of a call, or the end of all calls that have begun. A call may begin without ending, because a
// backward pass computes its operands again or XLA merges two beginnings. Marks of a rank do not overlap. The host may
// read at any time.
JAX_EP_FN void set_mark(Marks* marks, bool begins, int32_t call) {
  const uint64_t begun = load_relaxed(&marks->begun);
  if (!begins) return store_release(&marks->ended, begun);
  store_relaxed(&marks->call, static_cast<uint64_t>(call));
  store_release(&marks->begun, begun + 1);
}

}  // namespace jax_ep
