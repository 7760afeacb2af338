// The FFI handlers of the ops on rows.
#include "bindings/handler.h"
#include "kernels/moe/args.h"
#include "kernels/ragged/args.h"
#include "kernels/sparse/args.h"

namespace jax_ep {

std::vector<BoundOp> bind_row_ops() { return {JAX_EP_ROW_OPS(JAX_EP_BIND)}; }

}  // namespace jax_ep
