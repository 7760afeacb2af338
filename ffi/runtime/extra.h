// Kernels that only some platforms' libraries have.
#pragma once

#include <optional>
#include <string>

namespace jax_ep {

// Loads them on the current device, or says why that failed. Defined in runtime/cuda/alone.cc, or
// bindings/no_matmul.cc.
std::optional<std::string> load_extra_kernels();

}  // namespace jax_ep
