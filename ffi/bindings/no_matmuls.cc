// In place of matmuls.cc here and in runtime/cuda: the library for HIP has no matmuls.
#include "bindings/bound_op.h"
#include "runtime/gpu/kernel_launch.h"

namespace jax_ep {

std::vector<BoundOp> bind_matmuls() { return {}; }
std::optional<std::string> load_matmul_kernels() { return std::nullopt; }
std::vector<uint64_t*> product_timelines(int) { return {}; }

}  // namespace jax_ep
