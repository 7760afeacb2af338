#include "bindings/bound_op.h"

namespace jax_ep {

std::vector<BoundOp> bind_products() { return {}; }

}  // namespace jax_ep
