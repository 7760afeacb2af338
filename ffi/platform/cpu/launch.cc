#include "launch.h"

namespace jax_ep {
namespace {

ffi::ErrorOr<std::unique_ptr<CallSite>> make_call_site() { return std::make_unique<CallSite>(); }

}  // namespace

ffi::TypeId CallSite::id = {};

// Peers' memory is as near as one's own: no part is sent ahead.
int sparse_landing_room(int, int, bool) { return 0; }

XLA_FFI_TypeId* call_site_type() { return &CallSite::id; }

XLA_FFI_DEFINE_HANDLER_SYMBOL(call_site_handler, make_call_site, ffi::Ffi::BindInstantiate());

XLA_FFI_Handler* instantiate_handler() { return call_site_handler; }

}  // namespace jax_ep
