#include "runtime/call_site.h"

#include <string_view>

#include "runtime/sites.h"

namespace jax_ep {
namespace {

namespace ffi = xla::ffi;

// The attributes are those of the op; a grouped product has neither group nor site.
ffi::ErrorOr<std::unique_ptr<CallSite>> make_call_site(ffi::Dictionary attributes) {
  auto made = std::make_unique<CallSite>();
  if (const auto id = attributes.get<int64_t>("group"); id.has_value()) made->group = find_registration(*id);
  if (const auto site = attributes.get<std::string_view>("site"); site.has_value()) remember_site(*site);
  return made;
}

ffi::Error check_group(int32_t device, ffi::Dictionary attributes) {
  const auto id = attributes.get<int64_t>("group");
  if (!id.has_value()) return ffi::Error::Success();
  const std::shared_ptr<Group> group = find_group(*id);
  if (!group) return to_ffi(group_not_open());
  const std::optional<Seat> seat = group->find_seat(device);
  if (!seat) return ffi::Error::Success();  // as the op itself will say
  const std::optional<GroupError> error = group->error_before(*seat);
  return error ? to_ffi(*error) : ffi::Error::Success();
}

}  // namespace

ffi::TypeId CallSite::id = {};

XLA_FFI_DEFINE_HANDLER_SYMBOL(call_site_handler, make_call_site, ffi::Ffi::BindInstantiate().Attrs());
XLA_FFI_DEFINE_HANDLER_SYMBOL(group_check_handler, check_group,
                              ffi::Ffi::BindInitialize().Ctx<ffi::DeviceOrdinal>().Attrs());

}  // namespace jax_ep
