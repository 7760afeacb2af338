// The products with a collective, as the host starts them on Hopper GPUs.
#pragma once

#include <cuda_runtime_api.h>

#include <optional>
#include <string>

#include "kernels/matmul/plan.h"

namespace jax_ep {

// Starts this rank's part on the stream of the current device, or says why it cannot. May be captured in a CUDA graph.
std::optional<std::string> launch_matmul(const OverlapConfig& config, cudaStream_t stream, const Comm& comm,
                                         const MatmulReduceArgs& args);
std::optional<std::string> launch_matmul(const OverlapConfig& config, cudaStream_t stream, const Comm& comm,
                                         const GatherMatmulArgs& args);

// The same for two ranks.
std::optional<std::string> launch_exchange(const OverlapConfig& config, cudaStream_t stream, const Comm& comm,
                                           const MatmulReduceArgs& args);

// Loads every kernel on the current device, if it is a Hopper.
cudaError_t load_matmul_reduce();
cudaError_t load_matmul_exchange();
cudaError_t load_gather_matmul();

}  // namespace jax_ep
