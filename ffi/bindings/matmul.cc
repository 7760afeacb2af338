// The FFI handlers of the matrix products: those with a collective, and those that need no group of ranks.
#include "bindings/handler.h"
#include "kernels/matmul/args.h"
#include "kernels/matmul/product_spec.h"

namespace jax_ep {

std::vector<BoundOp> bind_products() {
#define JAX_EP_BOUND(Args) bind<Args>(),
  return {JAX_EP_MATMUL_OPS(JAX_EP_BOUND)};
#undef JAX_EP_BOUND
}

std::vector<BoundOp> bind_alone() {
#define JAX_EP_BOUND(Args) bind_one_alone<Args>(),
  return {JAX_EP_ALONE_OPS(JAX_EP_BOUND)};
#undef JAX_EP_BOUND
}

}  // namespace jax_ep
