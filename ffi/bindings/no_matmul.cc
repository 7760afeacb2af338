#include "bindings/bound_op.h"
#include "platform/launch.h"

namespace jax_ep {

std::vector<BoundOp> bind_product_ops() { return {}; }
std::vector<BoundOp> bind_local_ops() { return {}; }
std::optional<std::string> load_extra_kernels() { return std::nullopt; }

}  // namespace jax_ep
