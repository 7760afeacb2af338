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
#include "platform/launch.h"  // of runtime/cpu or runtime/gpu, whichever CMake puts on the include path
#include "runtime/registry.h"

namespace jax_ep {

// The group of a call and the rank id of its device, or why there is none.
struct Caller {
  std::shared_ptr<PlatformGroup> group;
  RankId rank_id;
  std::optional<ffi::Error> error;
};

inline Caller find_caller(const Call& call, const char* op, std::optional<int64_t> id) {
  Caller caller{id ? std::static_pointer_cast<PlatformGroup>(find_group(*id)) : nullptr, {}, std::nullopt};
  const bool alike = !id || call.meets(*id, caller.group);
  if (!caller.group) {
    caller.error = to_ffi(group_not_open());
  } else if (!alike) {
    caller.error = to_ffi(closed_too_early());
  } else if (const std::optional<RankId> rank_id = caller.group->find_rank_id(call.device)) {
    caller.rank_id = *rank_id;
  } else {
    caller.error = ffi::Error(ffi::ErrorCode::kInvalidArgument,
                              concat(op, ": device must be in the group of this program, got device ", call.device));
  }
  return caller;
}

// The name of an op for users.
template <class Args>
std::string op_name(const Args& args) {
  if constexpr (kIsLocal<Args>)
    return OpSpec<Args>::kFfiTarget;
  else
    return name_of(kind_of(args));
}

template <class Args>
LaunchResult execute(Call call, ffi::RemainingArgs operands, ffi::RemainingRets results, ffi::Dictionary attributes) {
  const Attributes settings(attributes);
  Caller caller{};
  int ranks = 1;
  if constexpr (!kIsLocal<Args>) {
    caller = find_caller(call, OpSpec<Args>::kFfiTarget, settings.integer("group"));
    if (caller.error) return fail_call(*caller.error);
    ranks = caller.group->size();
  }
  Args args{};
  std::optional<std::string> error = read_settings(settings, ranks, kSendsAhead, &args);
  if (!error) error = set_pointers(CallBuffers(operands, results), ranks, &args);
  if (error) return fail_call({ffi::ErrorCode::kInvalidArgument, concat(op_name(args), ": ", *error)});
  if constexpr (kIsLocal<Args>)
    return launch_local(call, args);
  else
    return launch(call, caller.group, caller.rank_id, number_of_site(settings.text("site").value_or("")), args);
}

template <class Args>
CallTypes call_types(const Settings& settings, int ranks) {
  Args args{};
  if (const auto error = read_settings(settings, ranks, kSendsAhead, &args))
    throw std::invalid_argument(concat(op_name(args), ": ", *error));
  std::vector<ResultType> results;
  OpSpec<Args>::buffers(args, ranks, [&](const BufferSpec& spec, auto) {
    if (spec.present && spec.is_result())
      results.emplace_back(spec.name, spec.values == Values::any ? nullptr : name_of(spec.values),
                           std::vector<int64_t>(spec.sizes, spec.sizes + spec.ndim), spec.is_replicated);
  });
  if (const int64_t bytes = for_each_part(args, ranks, [](auto, int64_t) {}))
    results.emplace_back("workspace", name_of(Values::uint8), std::vector{bytes}, false);
  return {op_name(args), results};
}

template <class Args>
OpNames names_in_spec(const char* arguments) {
  using Spec = OpSpec<Args>;
  Names ops, operands, results;
  std::vector<std::pair<std::string, std::string>> settings;
  if constexpr (kIsLocal<Args>)
    ops = {Spec::kFfiTarget};
  else
    for (const KindName& kind : Spec::kKinds) ops.push_back(kind.name);
  Spec::settings([&](const char* name, const char* label, auto) { settings.emplace_back(name, label ? label : ""); });
  Spec::buffers(Args{}, 1, [&](const BufferSpec& spec, auto) {
    if (spec.use == Use::operand || spec.use == Use::updated) operands.push_back(spec.name);
    if (spec.is_result()) results.push_back(spec.name);
  });
  return {arguments, ops, settings, operands, results};
}

template <class Args>
BoundOp bind(const char* arguments) {
  XLA_FFI_DEFINE_HANDLER(handler, execute<Args>, ffi::Ffi::Bind().Ctx<Call>().RemainingArgs().RemainingRets().Attrs(),
                         {kTraits});
  return {OpSpec<Args>::kFfiTarget, handler, call_types<Args>, names_in_spec<Args>(arguments)};
}

}  // namespace jax_ep

// For the lists of kernels/ops.h.
#define JAX_EP_BIND(Args) bind<Args>(#Args),
