// The state that XLA keeps for each custom call of a program, made when the program is compiled or loaded.
#pragma once

#include <memory>

#include "heap/group.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ep {

struct CallSite {
  std::shared_ptr<Group> group;  // lives as long as the programs compiled for it, unless it is closed; may be null

  static xla::ffi::TypeId id;
};

// The stage that makes them.
XLA_FFI_DECLARE_HANDLER_SYMBOL(call_site_handler);

}  // namespace jax_ep
