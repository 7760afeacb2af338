// Launching kernels: plain functions, so that only the .cu files are device code.
#pragma once

#include <optional>
#include <string>

#include "comm/timeline.h"
#include "kernels/matmul/args.h"
#include "kernels/moe/args.h"
#include "kernels/plan.h"
#include "kernels/ragged/args.h"
#include "kernels/sparse/args.h"
#include "platform/runtime.h"

namespace jax_ep {

gpu::Error launch_kernel(const LaunchConfig& config, gpu::Stream stream, const Comm& comm, const DispatchArgs& args);
gpu::Error launch_kernel(const LaunchConfig& config, gpu::Stream stream, const Comm& comm, const ScatterArgs& args);
gpu::Error launch_kernel(const LaunchConfig& config, gpu::Stream stream, const Comm& comm, const CombineArgs& args);
gpu::Error launch_kernel(const LaunchConfig& config, gpu::Stream stream, const Comm& comm, const RaggedArgs& args);
gpu::Error launch_kernel(const LaunchConfig& config, gpu::Stream stream, const Comm& comm, const SparseUnionArgs& args);
gpu::Error launch_kernel(const LaunchConfig& config, gpu::Stream stream, const Comm& comm,
                         const SparseReduceArgs& args);

// The products with a collective, which only the library for CUDA has. They say why they cannot start.
std::optional<std::string> launch_matmul(const HardwareModel& model, gpu::Stream stream, const Comm& comm,
                                         const MatmulReduceArgs& args);
std::optional<std::string> launch_matmul(const HardwareModel& model, gpu::Stream stream, const Comm& comm,
                                         const GatherMatmulArgs& args);

// Answers so many questions of the host for the time of the current device, on its default stream.
gpu::Error launch_clock(ClockFace* face, int questions);

// Loads every kernel on the current device, where a block has so much shared memory: a first launch would wait for a
// spinning kernel to end.
gpu::Error load_kernels(int shared_bytes);

}  // namespace jax_ep
