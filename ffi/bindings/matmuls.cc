// The FFI handlers of the matmuls: those with a collective, and the grouped one, which needs no group of ranks.
#include "bindings/handler.h"
#include "kernels/collective_matmul/args.h"
#include "kernels/grouped_matmul/args.h"

namespace jax_ep {

std::vector<BoundOp> bind_matmuls() {
  return {JAX_EP_COLLECTIVE_MATMUL_OPS(JAX_EP_BIND) JAX_EP_BIND(gemm::GroupedMatmul)};
}

}  // namespace jax_ep
