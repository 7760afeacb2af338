// Starts an op on a GPU: one kernel on XLA's stream.
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "runtime/gpu/device_scope.h"
#include "runtime/gpu/kernel_launch.h"
#include "runtime/gpu/stream_order.h"
#include "runtime/profiler.h"
#include "runtime/reach.h"
#include "runtime/registry.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ep {

namespace ffi = xla::ffi;

using LaunchResult = ffi::Error;
constexpr ffi::Traits kTraits = ffi::Traits::kCmdBufferCompatible;
constexpr bool kSendsAhead = true;  // a read of a peer's memory takes longer than a write

class PlatformGroup final : public Group {
 public:
  PlatformGroup(std::vector<std::vector<int>> lines, double timeout_seconds, bool poison, Neighbours neighbours = {},
                int64_t id = 0);

  // Also raises the abort words, for graphs that were captured and may be launched again.
  void close() override;

  // The most CTAs that an op has.
  int max_ctas() const { return model_.row_sms; }
  // Of all SMs, whatever max_sms is.
  Products products() const { return {product_ctas_, &product_timelines}; }

  // The model of all GPUs of the group, within max_sms.
  const HardwareModel& model() const { return model_; }

  // Limits the SMs of all ops. Called before the group is registered.
  void limit_sms(int most) { model_ = jax_ep::limit_sms(model_, most); }

  // Test hook: from now on this rank's ops are not launched.
  void stall(int rank, const std::string&) { stalled_ = rank; }
  bool stalled(RankId rank_id) const { return rank_id.rank == stalled_; }

  gpu::StreamOrder& order(RankId rank_id) { return orders_[rank_id.line * size() + rank_id.rank]; }

 private:
  HardwareModel model_;
  const int product_ctas_ = model_.sms;
  int stalled_ = -1;
  std::deque<gpu::StreamOrder> orders_;  // by rank index
};

// XLA's context of a call.
struct Call {
  gpu::Stream stream;
  int device;

  // Always true: a captured graph calls no handler, so ranks of a run cannot be compared here.
  bool meets(int64_t, const std::shared_ptr<Group>&) const { return true; }
};

inline ffi::Error fail_call(ffi::Error error) { return error; }

inline gpu::Error copy_all(const std::vector<Copy>& copies, gpu::Stream stream) {
  for (const Copy& copy : copies)
    if (const gpu::Error error = gpu::copy(copy.to, copy.from, copy.bytes, stream); error != gpu::kSuccess)
      return error;
  return gpu::kSuccess;
}

// Fails the group, as this rank cannot run its op.
inline ffi::Error give_up(PlatformGroup& group, RankId rank_id, const GroupError& error) {
  group.give_up(rank_id, error);
  return to_ffi(error);
}

template <class Args>
ffi::Error launch(const Call& call, const std::shared_ptr<PlatformGroup>& group, RankId rank_id, int32_t site,
                  const Args& args) try {
  if (const std::optional<GroupError> failed = group->failure()) return to_ffi(*failed);
  if (group->stalled(rank_id)) return ffi::Error::Success();
  const gpu::StreamOrder::Turn turn(group->order(rank_id), call.stream);
  Reached<Args> reached = reach(*group, rank_id, args, site);
  const auto start = [&]() -> std::optional<std::string> {
    if constexpr (kIsCollectiveMatmul<Args>) {
      const OverlapConfig config = plan_overlap(shape_of(args, group->size()), group->model());
      set_signature(&reached.comm, with_plan(reached.comm.signature, config));
      return OverlapKernel<Args>::start(config, call.stream, reached.comm, reached.args);
    } else {
      using Spec = OpSpec<Args>;
      const LaunchConfig config =
          plan_rows(RowShape{Spec::kLaunch, group->size(), Spec::work_size(args)}, group->model());
      return gpu::explain(start_kernel(config, call.stream, reached.comm, reached.args), config);
    }
  };
  std::optional<std::string> error = gpu::explain(copy_all(reached.before, call.stream));
  if (!error) error = start();
  if (!error) error = gpu::explain(copy_all(reached.after, call.stream));
  if (!error) return ffi::Error::Success();
  return give_up(*group, rank_id, {ErrorKind::other, concat("launching ", name_of(kind_of(args)), ": ", *error)});
} catch (const GroupException& failure) {
  return give_up(*group, rank_id, failure.error);
} catch (const std::exception& error) {
  return give_up(*group, rank_id, {ErrorKind::other, concat(name_of(kind_of(args)), ": ", error.what())});
}

template <class Args>
ffi::Error launch_local(const Call& call, const Args& args) {
  const std::optional<std::string> error = start_local(call.stream, args);
  if (!error) return ffi::Error::Success();
  return {ffi::ErrorCode::kInvalidArgument, concat(OpSpec<Args>::kFfiTarget, ": ", *error)};
}

inline ffi::Error mark(const Call& call, Marks* marks, bool begins, int32_t text) {
  const std::optional<std::string> error = gpu::explain(launch_mark(call.stream, marks, begins, text));
  return error ? ffi::Error::Internal("marking a call: " + *error) : ffi::Error::Success();
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
