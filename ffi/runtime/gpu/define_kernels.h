// What kernel_launch.h declares; for the files that instantiate it alone.
#pragma once

#include <type_traits>

#include "kernels/kernels.h"
#include "runtime/gpu/kernel_launch.h"

namespace jax_ep {

constexpr int kMaxThreads = 256;
static_assert(Team::lanes == gpu::kTeamLanes, "the host reckons with the same teams");
static_assert(kMaxThreads / Team::lanes <= kMaxSquadTeams, "the scratch of routing has room for no more");

template <class Row, class Args>
__global__ void __launch_bounds__(kMaxThreads, 1)
    kernel(const Comm comm, const Args args, int pushers, int team_bytes) {
  static_assert(sizeof(comm) + sizeof(args) < 1024, "a launch copies its arguments, and reads them from cold memory");
  const Team team = this_team(pushers, team_bytes);
  if constexpr (std::is_void_v<Row>)
    run_kernel(comm, args, team);
  else
    run_kernel<Row>(comm, args, team);
}

// The op has another kernel for long batches.
template <class Args>
constexpr bool kHasLongKernel = std::is_same_v<Args, CombineArgs>;

template <class Row, class Args>
gpu::Error Kernel<Row, Args>::start(const LaunchConfig& config, gpu::Stream stream, const Comm& comm,
                                    const Args& args) {
  if constexpr (kHasLongKernel<Args>)
    if (sums_long_batches(args)) return Kernel<Row, LongCombineArgs>::start(config, stream, comm, {args});
  const int shared = config.threads / Team::lanes * config.team_bytes;
  kernel<Row, Args>
      <<<config.blocks, config.threads, shared, stream>>>(comm, args, config.pushers_per_block, config.team_bytes);
  return gpu::take_last_error();
}

template <class Row, class Args>
gpu::Error Kernel<Row, Args>::load(int shared_bytes) {
  if constexpr (kHasLongKernel<Args>)
    if (const gpu::Error error = Kernel<Row, LongCombineArgs>::load(shared_bytes); error != gpu::kSuccess) return error;
  const void* address = reinterpret_cast<const void*>(&kernel<Row, Args>);
  const gpu::Error error = gpu::load_kernel(address);
  return error == gpu::kSuccess ? gpu::allow_shared(address, shared_bytes) : error;
}

}  // namespace jax_ep
