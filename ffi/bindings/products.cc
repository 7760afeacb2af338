// The FFI handlers of the matrix products: those with a collective, and those that need no group of ranks.
#include "bindings/handler.h"
#include "kernels/collective_matmul/args.h"
#include "kernels/grouped_matmul/args.h"

namespace jax_ep {

std::vector<BoundOp> bind_product_ops() { return {JAX_EP_COLLECTIVE_MATMUL_OPS(JAX_EP_BIND)}; }
std::vector<BoundOp> bind_local_ops() { return {JAX_EP_LOCAL_OPS(JAX_EP_BIND)}; }

}  // namespace jax_ep
