// The FFI handlers of the matrix products with a collective, a dispatch or a combine.
#include "bindings/handler.h"
#include "kernels/matmul/args.h"
#include "kernels/moe/args.h"
#include "kernels/moe/dot_args.h"

namespace jax_ep {

std::vector<BoundOp> bind_products() {
#define JAX_EP_BOUND(Args) bind<Args>(),
  return {JAX_EP_PRODUCT_OPS(JAX_EP_BOUND)};
#undef JAX_EP_BOUND
}

}  // namespace jax_ep
