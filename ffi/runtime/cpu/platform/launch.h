// Starts an op on the CPU: parks the call with its group, and returns a future to XLA.
#pragma once

#include <algorithm>
#include <memory>
#include <mutex>
#include <optional>

#include "kernels/kernels.h"
#include "runtime/cpu/cpu_group.h"
#include "runtime/reach.h"
#include "runtime/registry.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ep {

namespace ffi = xla::ffi;

using PlatformGroup = CpuGroup;

using LaunchResult = ffi::Future;
constexpr ffi::Traits kTraits = static_cast<ffi::Traits>(0);
constexpr bool kSendsAhead = false;  // peers' memory is as near as one's own

// XLA's context of a call.
struct Call {
  const CallState* state;
  int64_t run;
  int device;

  bool meets(int64_t id, const std::shared_ptr<Group>& group) const { return meets_alike(run, id, group); }
};

inline ffi::Future fail_call(ffi::Error error) {
  ffi::Promise promise;
  ffi::Future future(promise);
  promise.SetError(std::move(error));
  return future;
}

// Notes in the timeline that a rank came to its next op at `arrived_ns`, or when it left the op before, if that was
// later.
inline void note_arrival(const SignalPad* signal_pad, OpKind op, uint64_t arrived_ns) {
  Track* const track = find_track(signal_pad, Coop{});
  if (!track) return;
  const uint64_t count = load_relaxed(&track->count);
  const uint64_t left_ns = count ? load_relaxed(&track->events[(count - 1) & track->mask].ns) : 0;
  append(track, load_relaxed(&signal_pad->epoch) + 1, op, Phase::arrive);
  store_relaxed(&track->events[count & track->mask].ns, std::max(arrived_ns, left_ns));
}

template <class Args>
void run_here(Group& group, RankId rank_id, int32_t site, const Args& args, uint64_t arrived_ns) {
  const Reached<Args> reached = reach(group, rank_id, args, site);
  note_arrival(reached.comm.own_signal_pad, kind_of(args), arrived_ns);
  for (const Copy& copy : reached.before) std::memcpy(copy.to, copy.from, copy.bytes);
  with_kernel(reached.args, reached.comm.size, /*ctas=*/1, [&](auto format, const auto& kernel_args) {
    run_kernel<decltype(format)>(reached.comm, kernel_args, Coop{});
  });
  for (const Copy& copy : reached.after) std::memcpy(copy.to, copy.from, copy.bytes);
}

template <class Args>
ffi::Future launch(const Call& call, const std::shared_ptr<CpuGroup>& group, RankId rank_id, int32_t site,
                   const Args& args) {
  ffi::Promise promise;
  ffi::Future future(promise);
  Task task = [group = group.get(), rank_id, site, args, arrived_ns = clock_ns()] {
    run_here(*group, rank_id, site, args, arrived_ns);
  };
  group->arrive(call.state, call.run, {signature_of(args), site}, rank_id, std::move(task),
                [promise](const std::optional<GroupError>& error) mutable {
                  error ? promise.SetError(to_ffi(*error)) : promise.SetAvailable();
                });
  return future;
}

// Local ops have no kernels on a CPU. Its library types and checks their calls, for tests that trace them there.
template <class Args>
ffi::Future launch_local(const Call&, const Args&) {
  return fail_call({ffi::ErrorCode::kUnimplemented, concat(OpSpec<Args>::kFfiTarget, ": only Hopper GPUs have it")});
}

inline ffi::Error mark(const Call&, Marks* marks, bool begins, int32_t text) {
  static std::mutex mutex;  // XLA may run independent ops at once
  const std::lock_guard lock(mutex);
  set_mark(marks, begins, text);
  return ffi::Error::Success();
}

}  // namespace jax_ep

namespace xla::ffi {

template <>
struct CtxDecoding<jax_ep::Call> {
  using Type = jax_ep::Call;

  static std::optional<Type> Decode(const XLA_FFI_Api* api, XLA_FFI_ExecutionContext* ctx, DiagnosticEngine& why) {
    const auto state = CtxDecoding<State<jax_ep::CallState>>::Decode(api, ctx, why);
    const auto run = CtxDecoding<RunId>::Decode(api, ctx, why);
    const auto device = CtxDecoding<DeviceOrdinal>::Decode(api, ctx, why);
    if (!state || !run || !device) return std::nullopt;
    return jax_ep::Call{*state, run->run_id, *device};
  }
};

}  // namespace xla::ffi
