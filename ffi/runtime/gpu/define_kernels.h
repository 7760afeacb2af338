// The kernels of the ops on rows. They are instantiated in kernels.cu, and in a file for each dtype
// (ffi/kernel_instances.cmake).
#pragma once

#include "kernels/kernels.h"
#include "runtime/gpu/kernel_launch.h"

namespace jax_ep {

static_assert(Coop::lanes == gpu::kWarpLanes, "host and device must agree on the lanes of a coop");
static_assert(kRowThreads / Coop::lanes <= kMaxCtaCoops, "the scratch of routing has room for no more");

template <class Format, class Args>
__global__ void __launch_bounds__(kRowThreads, 1)
    kernel(const Comm comm, const Args args, int senders, int warp_bytes) {
  run_kernel<Format>(comm, args, this_coop(senders, warp_bytes));
}

// As start_kernel and load_kernels.
template <class Format, class Args>
struct Kernel {
  static gpu::Error start(const LaunchConfig& config, gpu::Stream stream, const Comm& comm, const Args& args);
  static gpu::Error load(int shared_bytes);
};

template <class Format, class Args>
gpu::Error Kernel<Format, Args>::start(const LaunchConfig& config, gpu::Stream stream, const Comm& comm,
                                       const Args& args) {
  static_assert(parameter_bytes<Comm, Args, int, int>() <= kMaxParameterBytes);
  const int shared = config.threads / Coop::lanes * config.warp_bytes;
  kernel<Format, Args>
      <<<config.ctas, config.threads, shared, stream>>>(comm, args, config.senders_per_cta, config.warp_bytes);
  return gpu::take_last_error();
}

template <class Format, class Args>
gpu::Error Kernel<Format, Args>::load(int shared_bytes) {
  const void* address = reinterpret_cast<const void*>(&kernel<Format, Args>);
  const gpu::Error error = gpu::load_kernel(address);
  return error == gpu::kSuccess ? gpu::allow_shared(address, shared_bytes) : error;
}

}  // namespace jax_ep
