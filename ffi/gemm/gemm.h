// Matrix products on Hopper, as the host calls them.
#pragma once

#include <cuda_runtime_api.h>

#include <optional>
#include <string>

#include "gemm/arguments.h"
#include "gemm/plan.h"

namespace jax_ep::gemm {

// Starts the product on the stream of the current device, or says why it cannot. May be captured in a CUDA graph.
std::optional<std::string> launch(const Arguments& arguments, const Config& config, cudaStream_t stream);

// With a config whose swap_ab is set.
std::optional<std::string> launch_swapped(const Arguments& arguments, const Config& config, cudaStream_t stream);

// As it is planned for the current device.
std::optional<std::string> launch(const Arguments& arguments, cudaStream_t stream);

std::optional<std::string> launch(const GatedArguments& arguments, cudaStream_t stream);

std::optional<std::string> launch(const SummedArguments& arguments, cudaStream_t stream);

std::optional<std::string> launch(const Float8Arguments& arguments, cudaStream_t stream);

std::optional<std::string> launch(const GatedFloat8Arguments& arguments, cudaStream_t stream);

// Loads every kernel on the current device, if it is a Hopper: a first launch would wait for a spinning kernel to end.
cudaError_t load();
cudaError_t load_swapped();
cudaError_t load_gated();
cudaError_t load_summed();
cudaError_t load_float8();
cudaError_t load_gated_float8();

}  // namespace jax_ep::gemm
