// The kernels on rows of one dtype. Each dtype is a file of its own, as a compiler takes minutes for it.
#pragma once

#include <variant>

#include "runtime/gpu/kernel_launch.h"

namespace jax_ep {

using RowArgs = std::variant<DispatchArgs, ScatterArgs, CombineArgs, LongCombineArgs, SparseReduceArgs>;

// As launch_kernel and load_kernels. `T`: the rows' dtype.
template <class T>
struct RowKernels {
  static gpu::Error start(const LaunchConfig& config, gpu::Stream stream, const Comm& comm, const RowArgs& args);
  static gpu::Error load(int shared_bytes);
};

}  // namespace jax_ep
