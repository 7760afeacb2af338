// In place of runtime/cuda/local_ops.cc: the library for HIP has no local ops.
#include "runtime/gpu/kernel_launch.h"

namespace jax_ep {

std::optional<std::string> load_local_kernels() { return std::nullopt; }

}  // namespace jax_ep
