// The FFI handler of any op, from its spec: decode, check, launch.
#pragma once

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings/bound_op.h"
#include "bindings/buffers.h"
#include "bindings/settings.h"
#include "platform/launch.h"
#include "runtime/registry.h"

namespace jax_ep {

// The group of a call and the seat of its device in it, or why there is none.
struct Caller {
  std::shared_ptr<PlatformGroup> group;
  Seat seat;
  std::optional<ffi::Error> error;
};

inline Caller find_caller(const Call& call, std::optional<int64_t> id) {
  Caller caller{id ? std::static_pointer_cast<PlatformGroup>(find_group(*id)) : nullptr, {}, std::nullopt};
  if (!caller.group) {
    caller.error = to_ffi(group_not_open());
  } else if (const std::optional<Seat> seat = caller.group->find_seat(call.device)) {
    caller.seat = *seat;
  } else {
    caller.error = ffi::Error(ffi::ErrorCode::kInvalidArgument,
                              "device " + std::to_string(call.device) + " is not in the group of this program");
  }
  return caller;
}

// What users know an op as.
template <class Args>
std::string op_name(const Args& args) {
  if constexpr (kIsAlone<Args>)
    return OpSpec<Args>::kTarget;
  else
    return name_of(kind_of(args));
}

template <class Args>
std::string wrong_call(const Args& args, const std::string& what) {
  return op_name(args) + ": " + what;
}

template <class Args>
LaunchResult execute(Call call, ffi::RemainingArgs operands, ffi::RemainingRets results, ffi::Dictionary attributes) {
  const Attributes settings(attributes);
  const Caller caller = find_caller(call, settings.integer("group"));
  if (caller.error) return fail_call(*caller.error);
  Args args{};
  std::optional<std::string> error = read_settings(settings, caller.group->size(), kSendsAhead, &args);
  if (!error) error = set_pointers(CallBuffers(operands, results), caller.group->size(), &args);
  if (error) return fail_call({ffi::ErrorCode::kInvalidArgument, wrong_call(args, *error)});
  const int32_t site = number_of_site(settings.text("site").value_or(""));
  return launch(call, caller.group, caller.seat, site, args);
}

// An op that needs no group of ranks.
template <class Args>
LaunchResult execute_alone(Call call, ffi::RemainingArgs operands, ffi::RemainingRets results,
                           ffi::Dictionary attributes) {
  Args args{};
  std::optional<std::string> error = read_settings(Attributes(attributes), 1, kSendsAhead, &args);
  if (!error) error = set_pointers(CallBuffers(operands, results), 1, &args);
  if (error) return fail_call({ffi::ErrorCode::kInvalidArgument, wrong_call(args, *error)});
  return launch_alone(call, args);
}

template <class Args>
CallTypes call_types(const Settings& settings, int ranks) {
  Args args{};
  if (const auto error = read_settings(settings, ranks, kSendsAhead, &args))
    throw std::invalid_argument(wrong_call(args, *error));
  CallTypes types{op_name(args), {}};
  OpSpec<Args>::buffers(args, ranks, [&](const BufferSpec& spec, auto) {
    if (!spec.present || !spec.is_result()) return;
    types.results.push_back({spec.name, spec.values == Values::any ? nullptr : name_of(spec.values),
                             std::vector<int64_t>(spec.sizes, spec.sizes + spec.rank), spec.is_alike});
  });
  if (const int64_t bytes = for_each_part(args, ranks, [](auto, int64_t) {}))
    types.results.push_back({"workspace", name_of(Values::uint8), {bytes}, false});
  return types;
}

template <class Args>
BoundOp bind() {
  XLA_FFI_DEFINE_HANDLER(handler, execute<Args>, ffi::Ffi::Bind().Ctx<Call>().RemainingArgs().RemainingRets().Attrs(),
                         {kTraits});
  XLA_FFI_DEFINE_HANDLER(uncaptured, execute<Args>,
                         ffi::Ffi::Bind().Ctx<Call>().RemainingArgs().RemainingRets().Attrs());
  return {OpSpec<Args>::kTarget, handler, uncaptured, call_types<Args>};
}

template <class Args>
BoundOp bind_one_alone() {
  XLA_FFI_DEFINE_HANDLER(handler, execute_alone<Args>,
                         ffi::Ffi::Bind().Ctx<Call>().RemainingArgs().RemainingRets().Attrs(), {kTraits});
  return {OpSpec<Args>::kTarget, handler, nullptr, call_types<Args>};
}

}  // namespace jax_ep

#define JAX_EP_BIND(Args) template BoundOp bind<Args>();
