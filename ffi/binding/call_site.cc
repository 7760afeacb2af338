#include "binding/call_site.h"

#include <string_view>

#include "binding/registry.h"
#include "heap/sites.h"

namespace jax_ep {
namespace {

namespace ffi = xla::ffi;

// The attributes are those of the op; a grouped product has neither group nor site.
ffi::ErrorOr<std::unique_ptr<CallSite>> make_call_site(ffi::Dictionary attributes) {
  auto made = std::make_unique<CallSite>();
  if (const auto id = attributes.get<int64_t>("group"); id.has_value()) made->group = find_group(*id);
  if (const auto site = attributes.get<std::string_view>("site"); site.has_value()) remember_site(*site);
  return made;
}

}  // namespace

ffi::TypeId CallSite::id = {};

XLA_FFI_DEFINE_HANDLER_SYMBOL(call_site_handler, make_call_site, ffi::Ffi::BindInstantiate().Attrs());

}  // namespace jax_ep
