// The kernels of a GPU library: every op instantiated for every dtype of rows.
#include <type_traits>

#include "kernels/kernels.h"
#include "platform/gpu/kernel_launch.h"

namespace jax_ep {
namespace {

constexpr int kMaxThreads = 256;
static_assert(Team::lanes == gpu::kTeamLanes, "the host reckons with the same teams");
static_assert(kMaxThreads / Team::lanes <= kMaxSquadTeams, "the scratch of routing has room for no more");

// `T`: the dtype of rows, void where an op does not look at it.
template <class T, class Args>
__global__ void __launch_bounds__(kMaxThreads, 1)
    kernel(const Comm comm, const Args args, int pushers, int team_bytes) {
  const Team team = this_team(pushers, team_bytes);
  if constexpr (std::is_void_v<T>)
    run_kernel(comm, args, team);
  else
    run_kernel<T>(comm, args, team);
}

__global__ void answer_with_time(ClockFace* face, int questions) {
  constexpr uint64_t kTimeoutNs = 10'000'000'000;
  const uint64_t deadline = clock_ns() + kTimeoutNs;
  for (int question = 1; question <= questions; ++question) {
    if (spin_until(&face->asked, question, &face->cancelled, deadline) != Status::ok) return;
    store_relaxed(&face->ns, clock_ns());
    store_release(&face->answered, static_cast<uint64_t>(question));
  }
}

template <class T, class Args>
gpu::Error start(const LaunchConfig& config, gpu::Stream stream, const Comm& comm, const Args& args) {
  const int shared = config.threads / Team::lanes * config.team_bytes;
  kernel<T, Args>
      <<<config.blocks, config.threads, shared, stream>>>(comm, args, config.pushers_per_block, config.team_bytes);
  return gpu::take_last_error();
}

template <class Args>
gpu::Error start_any(const LaunchConfig& config, gpu::Stream stream, const Comm& comm, const Args& args) {
  switch (args.dtype) {
    case DType::float32:
      return start<float>(config, stream, comm, args);
    case DType::bfloat16:
      return start<BFloat16>(config, stream, comm, args);
    default:
      return start<Float16>(config, stream, comm, args);
  }
}

template <class T, class Args>
gpu::Error load(int shared_bytes) {
  const void* address = reinterpret_cast<const void*>(&kernel<T, Args>);
  const gpu::Error error = gpu::load_kernel(address);
  return error == gpu::kSuccess ? gpu::allow_shared(address, shared_bytes) : error;
}

template <class T>
gpu::Error load_for_dtype(int shared_bytes) {
  for (const auto each : {&load<T, DispatchArgs>, &load<T, ScatterArgs>, &load<T, CombineArgs>,
                          &load<T, LongCombineArgs>, &load<T, SparseReduceArgs>})
    if (const gpu::Error error = each(shared_bytes); error != gpu::kSuccess) return error;
  return gpu::kSuccess;
}

}  // namespace

gpu::Error launch_kernel(const LaunchConfig& config, gpu::Stream stream, const Comm& comm, const DispatchArgs& args) {
  return start_any(config, stream, comm, args);
}
gpu::Error launch_kernel(const LaunchConfig& config, gpu::Stream stream, const Comm& comm, const ScatterArgs& args) {
  return start_any(config, stream, comm, args);
}
gpu::Error launch_kernel(const LaunchConfig& config, gpu::Stream stream, const Comm& comm, const CombineArgs& args) {
  if (sums_long_batches(args)) return start_any(config, stream, comm, LongCombineArgs{args});
  return start_any(config, stream, comm, args);
}
gpu::Error launch_kernel(const LaunchConfig& config, gpu::Stream stream, const Comm& comm, const RaggedArgs& args) {
  return start<void>(config, stream, comm, args);
}
gpu::Error launch_kernel(const LaunchConfig& config, gpu::Stream stream, const Comm& comm,
                         const SparseUnionArgs& args) {
  return start<void>(config, stream, comm, args);
}
gpu::Error launch_kernel(const LaunchConfig& config, gpu::Stream stream, const Comm& comm,
                         const SparseReduceArgs& args) {
  return start_any(config, stream, comm, args);
}

gpu::Error launch_clock(ClockFace* face, int questions) {
  answer_with_time<<<1, 1>>>(face, questions);
  return gpu::take_last_error();
}

gpu::Error load_kernels(int shared_bytes) {
  for (const auto each : {&load_for_dtype<float>, &load_for_dtype<BFloat16>, &load_for_dtype<Float16>,
                          &load<void, RaggedArgs>, &load<void, SparseUnionArgs>})
    if (const gpu::Error error = each(shared_bytes); error != gpu::kSuccess) return error;
  return gpu::kSuccess;
}

}  // namespace jax_ep
