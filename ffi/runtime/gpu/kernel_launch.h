// Launching kernels: plain functions, so that only the .cu files are device code.
#pragma once

#include <optional>
#include <string>

#include "comm/timeline.h"
#include "kernels/args.h"
#include "kernels/matmul/plan.h"
#include "kernels/plan.h"
#include "platform/runtime.h"

namespace jax_ep {

// The kernel of an op on rows of one dtype; void where it does not look at them. Defined in define_kernels.h, for the
// files that instantiate it: one for each dtype, as a compiler takes minutes for it.
template <class Row, class Args>
struct Kernel {
  static gpu::Error start(const LaunchConfig& config, gpu::Stream stream, const Comm& comm, const Args& args);
  // On the current device, where a block has so much shared memory: a first launch would wait for a spinning kernel to
  // end.
  static gpu::Error load(int shared_bytes);
};

// The kernel of a product with a collective, which only the library for CUDA has. Defined in overlap_launch.h, for the
// file of each.
template <class Args>
struct ProductKernel {
  // Says why it cannot start. May be captured in a graph.
  static std::optional<std::string> start(const OverlapConfig& config, gpu::Stream stream, const Comm& comm,
                                          const Args& args);
  // On the current device, if it is a Hopper.
  static gpu::Error load();
};

// Answers so many questions of the host for the time of the current device, on its default stream.
gpu::Error launch_clock(ClockFace* face, int questions);

// Loads every kernel of the ops that are no products.
gpu::Error load_kernels(int shared_bytes);

}  // namespace jax_ep
