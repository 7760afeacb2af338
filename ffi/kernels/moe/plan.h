// How dispatch_ragged_dot is laid over the SMs: a pure function of its shape and of the device.
#pragma once

#include <string>

#include "comm/hardware_model.h"
#include "gemm/plan.h"
#include "kernels/moe/dot_args.h"

namespace jax_ep {

struct DotShape {
  gemm::Shape product;
  int ranks, num_tokens, top_k, row_bytes;
};

DotShape shape_of(const DispatchDotArgs& args, int ranks);

// The first `dispatching` blocks, an even number, dispatch before they multiply. Meanwhile each pair of the others
// takes `head` tile pairs.
struct DotConfig {
  gemm::Config product;  // as the product alone is planned, so that sums have its order
  int dispatching;
  int senders_per_cta;  // of the warps that dispatch
  int head;

  std::string describe() const;
};

DotConfig plan(const DotShape& shape, const HardwareModel& model);

}  // namespace jax_ep
