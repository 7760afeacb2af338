// The FFI handlers of the ops of a dispatch.
#include "bindings/handler.h"
#include "kernels/moe/args.h"

namespace jax_ep {

JAX_EP_MOE_OPS(JAX_EP_BIND)

}  // namespace jax_ep
