// The FFI handler of ragged_all_to_all.
#include "bindings/handler.h"
#include "kernels/ragged/args.h"

namespace jax_ep {

JAX_EP_RAGGED_OPS(JAX_EP_BIND)

}  // namespace jax_ep
