// How the bindings start an op on a GPU: one kernel on XLA's stream.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "binding/registry.h"
#include "platform/gpu/device_scope.h"
#include "platform/gpu/kernel_launch.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ep {

namespace ffi = xla::ffi;

using LaunchResult = ffi::Error;
constexpr ffi::Traits kTraits = ffi::Traits::kCmdBufferCompatible;

class PlatformGroup final : public Group {
 public:
  PlatformGroup(std::vector<std::vector<int>> lines, double timeout_seconds, bool poison);

  // Also raises the abort words, for graphs that were captured and may be launched again.
  void close() override;

  int processors() const { return processors_; }

  // Test hook: from now on this rank's ops are not launched.
  void stall(int rank, const std::string&) { stalled_ = rank; }
  bool stalled(Seat seat) const { return seat.rank == stalled_; }

 private:
  int processors_ = 0;
  int stalled_ = -1;
};

// What a handler learns from XLA about its call.
struct Call {
  gpu::Stream stream;
  int device;
};

// A GPU's stream orders the ops of a rank; no call site needs an identity.
struct CallSite {
  static ffi::TypeId id;
};
inline XLA_FFI_Handler* instantiate_handler() { return nullptr; }
inline XLA_FFI_TypeId* call_site_type() { return nullptr; }

inline ffi::Error fail_call(ffi::Error error) { return error; }

inline int tokens_of(const RaggedArgs&) { return 0; }
template <class Args>
int tokens_of(const Args& args) {
  return args.num_tokens;
}

inline bool is_encoded(const DispatchArgs& args) { return args.wire_float8; }
template <class Args>
bool is_encoded(const Args&) {
  return false;
}

template <class Args>
ffi::Error launch(const Call& call, const std::shared_ptr<PlatformGroup>& group, Seat seat, const Args& args) {
  if (const std::optional<GroupError> failed = group->failure()) return to_ffi(*failed);
  if (group->stalled(seat)) return ffi::Error::Success();
  const LaunchConfig config = launch_config(kind_of(args), tokens_of(args), is_encoded(args), group->processors());
  const gpu::Error error = launch_kernel(config, call.stream, group->comm(seat), args);
  if (error == gpu::kSuccess) return ffi::Error::Success();
  return {ffi::ErrorCode::kInternal, std::string("launching ") + name_of(kind_of(args)) + ": " + gpu::describe(error)};
}

template <class Args>
ffi::Error launch_matmul(const Call& call, const std::shared_ptr<PlatformGroup>& group, Seat seat, const Args& args) {
  if (const std::optional<GroupError> failed = group->failure()) return to_ffi(*failed);
  if (group->stalled(seat)) return ffi::Error::Success();
  if (const auto error = launch_matmul(group->processors(), call.stream, group->comm(seat), args))
    return {ffi::ErrorCode::kInternal, std::string("launching ") + name_of(kind_of(args)) + ": " + *error};
  return ffi::Error::Success();
}

}  // namespace jax_ep

namespace xla::ffi {

template <>
struct CtxDecoding<jax_ep::Call> {
  using Type = jax_ep::Call;

  static std::optional<Type> Decode(const XLA_FFI_Api* api, XLA_FFI_ExecutionContext* ctx, DiagnosticEngine& why) {
    const auto stream = CtxDecoding<PlatformStream<jax_ep::gpu::Stream>>::Decode(api, ctx, why);
    const auto device = CtxDecoding<DeviceOrdinal>::Decode(api, ctx, why);
    if (!stream || !device) return std::nullopt;
    return jax_ep::Call{*stream, *device};
  }
};

}  // namespace xla::ffi
