// Handlers that only some platforms' libraries have.
#pragma once

#include <vector>

#include "xla/ffi/api/ffi.h"

namespace jax_ep {

struct NamedHandler {
  const char* name;
  XLA_FFI_Handler* handler;
};

// Of gemm.cc for CUDA, of no_extra.cc elsewhere.
std::vector<NamedHandler> extra_handlers();

}  // namespace jax_ep
