// The state that XLA keeps for each custom call of a program, made when the program is compiled or loaded.
#pragma once

#include <memory>

#include "runtime/registry.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ep {

struct CallSite {
  std::shared_ptr<Registration> group;  // stays open as long as programs that were compiled for it; may be null

  static xla::ffi::TypeId id;
};

// The stage that makes them.
XLA_FFI_DECLARE_HANDLER_SYMBOL(call_site_handler);

// The stage before each execution on a GPU, also of a captured graph, in which no op's handler is called: it raises
// what has failed the group, that it is closed, or an error of an earlier execution.
XLA_FFI_DECLARE_HANDLER_SYMBOL(group_check_handler);

}  // namespace jax_ep
