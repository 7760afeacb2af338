// The FFI handlers of the two ops of sparse_all_reduce.
#include "bindings/handler.h"
#include "kernels/sparse/args.h"

namespace jax_ep {

JAX_EP_SPARSE_OPS(JAX_EP_BIND)

}  // namespace jax_ep
