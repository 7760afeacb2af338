// Starting and loading the kernel of an op.
#pragma once

#include <type_traits>

#include "kernels/kernels.h"
#include "runtime/gpu/kernel_launch.h"

namespace jax_ep {

constexpr int kMaxThreads = 256;
static_assert(Team::lanes == gpu::kTeamLanes, "the host reckons with the same teams");
static_assert(kMaxThreads / Team::lanes <= kMaxSquadTeams, "the scratch of routing has room for no more");

// `T`: the dtype of rows, void where an op does not look at it.
template <class T, class Args>
__global__ void __launch_bounds__(kMaxThreads, 1)
    kernel(const Comm comm, const Args args, int pushers, int team_bytes) {
  static_assert(sizeof(comm) + sizeof(args) < 1024, "a launch copies its arguments, and reads them from cold memory");
  const Team team = this_team(pushers, team_bytes);
  if constexpr (std::is_void_v<T>)
    run_kernel(comm, args, team);
  else
    run_kernel<T>(comm, args, team);
}

template <class T, class Args>
gpu::Error start_kernel(const LaunchConfig& config, gpu::Stream stream, const Comm& comm, const Args& args) {
  const int shared = config.threads / Team::lanes * config.team_bytes;
  kernel<T, Args>
      <<<config.blocks, config.threads, shared, stream>>>(comm, args, config.pushers_per_block, config.team_bytes);
  return gpu::take_last_error();
}

template <class T, class Args>
gpu::Error load_kernel(int shared_bytes) {
  const void* address = reinterpret_cast<const void*>(&kernel<T, Args>);
  const gpu::Error error = gpu::load_kernel(address);
  return error == gpu::kSuccess ? gpu::allow_shared(address, shared_bytes) : error;
}

}  // namespace jax_ep
