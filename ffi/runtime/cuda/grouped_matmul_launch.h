// Matrix products on Hopper, as the host calls them: the functions of grouped_matmul_launch.cu.
#pragma once

#include <cuda_runtime_api.h>

#include <optional>
#include <string>

#include "gemm/grouped_matmul.h"
#include "gemm/plan.h"

namespace jax_ep::gemm {

// Starts the product on the stream of the current device, or says why it cannot. May be captured in a CUDA graph.
std::optional<std::string> launch(const GroupedMatmul& product, const Config& config, cudaStream_t stream);

Config plan_tiles(const GroupedMatmul& product, int sms);

// With the plan for the current device.
std::optional<std::string> launch(const GroupedMatmul& product, cudaStream_t stream);

// Loads every kernel on the current device, if it is a Hopper: a first launch would wait for a spinning kernel to end.
cudaError_t load();
}  // namespace jax_ep::gemm
