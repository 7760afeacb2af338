// How an op on rows is launched: a pure function of its shape and of the device, measured, not derived.
#pragma once

#include <string>

#include "comm/hardware_model.h"
#include "kernels/ops.h"

namespace jax_ep {

struct RowShape {
  OpKind op;
  int ranks;
  int num_tokens;  // or entries, or the rows that the op zeroes at least
  bool encoded;    // rows travel in float8
};

// Few blocks: they wait for peers, and other kernels must find room beside them. In each, the first warps are senders,
// which push rows to peers; the others are receivers, which take in what arrives.
struct LaunchConfig {
  int blocks;  // a block takes a whole SM
  int threads;
  int senders_per_cta;
  int warp_bytes;  // of shared memory, for each warp's stages

  std::string describe() const;
};

LaunchConfig plan(const RowShape& shape, const HardwareModel& model);

}  // namespace jax_ep
