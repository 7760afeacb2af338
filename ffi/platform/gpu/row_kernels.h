// The kernels on rows of one dtype. Each dtype is a file of its own, as a compiler takes minutes for it.
#pragma once

#include "platform/gpu/kernel_launch.h"

namespace jax_ep {

// As launch_kernel and load_kernels. `T`: the rows' dtype.
template <class T>
struct RowKernels {
  static gpu::Error start(const LaunchConfig& config, gpu::Stream stream, const Comm& comm, const DispatchArgs& args);
  static gpu::Error start(const LaunchConfig& config, gpu::Stream stream, const Comm& comm, const ScatterArgs& args);
  static gpu::Error start(const LaunchConfig& config, gpu::Stream stream, const Comm& comm, const CombineArgs& args);
  static gpu::Error start(const LaunchConfig& config, gpu::Stream stream, const Comm& comm,
                          const SparseReduceArgs& args);
  static gpu::Error load(int shared_bytes);
};

}  // namespace jax_ep
