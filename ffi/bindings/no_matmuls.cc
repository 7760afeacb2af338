// In place of matmuls.cc in a library without matmuls.
#include "bindings/bound_op.h"

namespace jax_ep {

std::vector<BoundOp> bind_matmuls() { return {}; }

}  // namespace jax_ep
