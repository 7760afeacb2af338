// The FFI handlers of a library, as XLA sees them.
#pragma once

#include "xla/ffi/api/ffi.h"

namespace jax_ep {

XLA_FFI_DECLARE_HANDLER_SYMBOL(dispatch_handler);
XLA_FFI_DECLARE_HANDLER_SYMBOL(scatter_handler);
XLA_FFI_DECLARE_HANDLER_SYMBOL(combine_handler);
XLA_FFI_DECLARE_HANDLER_SYMBOL(ragged_all_to_all_handler);
XLA_FFI_DECLARE_HANDLER_SYMBOL(sparse_union_handler);
XLA_FFI_DECLARE_HANDLER_SYMBOL(sparse_reduce_handler);
XLA_FFI_DECLARE_HANDLER_SYMBOL(matmul_reduce_handler);
XLA_FFI_DECLARE_HANDLER_SYMBOL(gather_matmul_handler);

}  // namespace jax_ep
