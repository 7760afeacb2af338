// Where a rank is among the ops across nodes. XLA's collectives between nodes tell nobody.
#pragma once

#include <cstdint>

#include "comm/platform.h"

namespace jax_ep {

// In host memory, also where kernels write it.
struct Marks {
  uint64_t begun, ended;  // ops
  uint64_t call;          // the one that was begun last, by the number of its text
};

// Marks the beginning of a call, or its end. Marks of a rank follow each other. The host may read meanwhile.
JAX_EP_FN void set_mark(Marks* marks, bool begins, int32_t call) {
  uint64_t* const count = begins ? &marks->begun : &marks->ended;
  if (begins) store_relaxed(&marks->call, static_cast<uint64_t>(call));
  store_release(count, load_relaxed(count) + 1);
}

}  // namespace jax_ep
