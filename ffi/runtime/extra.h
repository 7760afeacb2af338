// Handlers that only some platforms' libraries have, and the kernels behind them.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace jax_ep {

struct NamedHandler {
  const char* name;
  XLA_FFI_Handler* handler;
};

// Defined in gemm.cc for CUDA, in no_extra.cc elsewhere.
std::vector<NamedHandler> extra_handlers();

// Loads their kernels on the current device, or says why that failed.
std::optional<std::string> load_extra_kernels();

}  // namespace jax_ep
