// In place of products.cc in a library without matrix products.
#include "bindings/bound_op.h"

namespace jax_ep {

std::vector<BoundOp> bind_product_ops() { return {}; }
std::vector<BoundOp> bind_local_ops() { return {}; }

}  // namespace jax_ep
