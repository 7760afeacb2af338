// Launching kernels: plain functions, so that only kernels.cu is device code.
#pragma once

#include <optional>
#include <string>

#include "kernels/args.h"
#include "kernels/matmul_args.h"
#include "platform/gpu/launch_config.h"
#include "runtime.h"

namespace jax_ep {

gpu::Error launch_kernel(const LaunchConfig& config, gpu::Stream stream, const Comm& comm, const DispatchArgs& args);
gpu::Error launch_kernel(const LaunchConfig& config, gpu::Stream stream, const Comm& comm, const ScatterArgs& args);
gpu::Error launch_kernel(const LaunchConfig& config, gpu::Stream stream, const Comm& comm, const CombineArgs& args);
gpu::Error launch_kernel(const LaunchConfig& config, gpu::Stream stream, const Comm& comm, const RaggedArgs& args);

// The products with a collective, which only the library for CUDA has. They say why they cannot start.
std::optional<std::string> launch_matmul(int processors, gpu::Stream stream, const Comm& comm,
                                         const MatmulReduceArgs& args);
std::optional<std::string> launch_matmul(int processors, gpu::Stream stream, const Comm& comm,
                                         const GatherMatmulArgs& args);

// Loads every kernel on the current device: a first launch would wait for a spinning kernel to end.
gpu::Error load_kernels();

// The scratch of dispatch, in int32, and the bytes of a row in float8.
int64_t route_scratch(int num_experts);
int64_t wire_row_bytes(int hidden);

}  // namespace jax_ep
