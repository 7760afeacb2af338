#include "bindings/bound_op.h"
#include "platform/launch.h"

namespace jax_ep {

std::vector<BoundOp> bind_products() { return {}; }
std::vector<BoundOp> bind_alone() { return {}; }
std::optional<std::string> load_extra_kernels() { return std::nullopt; }

}  // namespace jax_ep
