// The kernels of a GPU library: every op instantiated for every dtype of rows.
#include "kernels/kernels.h"
#include "platform/gpu/kernel_launch.h"

namespace jax_ep {
namespace {

constexpr int kThreads = 512;

template <class T, class Args>
__global__ void __launch_bounds__(kThreads) kernel(const Comm comm, const Args args) {
  run_kernel<T>(comm, args, this_team());
}

template <class T, class Args>
gpu::Error start(const LaunchConfig& config, gpu::Stream stream, const Comm& comm, const Args& args) {
  kernel<T, Args><<<config.blocks, config.threads, 0, stream>>>(comm, args);
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

template <class T>
gpu::Error load_for_dtype() {
  const void* kernels[] = {reinterpret_cast<const void*>(&kernel<T, DispatchArgs>),
                           reinterpret_cast<const void*>(&kernel<T, ScatterArgs>),
                           reinterpret_cast<const void*>(&kernel<T, CombineArgs>)};
  for (const void* each : kernels)
    if (const gpu::Error error = gpu::load_kernel(each); error != gpu::kSuccess) return error;
  return gpu::kSuccess;
}

}  // namespace

LaunchConfig launch_config(OpKind op, int num_tokens, int processors) {
  const int most = processors / 4;
  const int warps_wanted = op == OpKind::ragged_all_to_all ? most * kThreads / 32 : num_tokens;
  const int blocks = (warps_wanted * 32 + kThreads - 1) / kThreads;
  return {blocks < 1 ? 1 : blocks < most ? blocks : most, kThreads};
}

gpu::Error launch_kernel(const LaunchConfig& config, gpu::Stream stream, const Comm& comm, const DispatchArgs& args) {
  return start_any(config, stream, comm, args);
}
gpu::Error launch_kernel(const LaunchConfig& config, gpu::Stream stream, const Comm& comm, const ScatterArgs& args) {
  return start_any(config, stream, comm, args);
}
gpu::Error launch_kernel(const LaunchConfig& config, gpu::Stream stream, const Comm& comm, const CombineArgs& args) {
  return start_any(config, stream, comm, args);
}
gpu::Error launch_kernel(const LaunchConfig& config, gpu::Stream stream, const Comm& comm, const RaggedArgs& args) {
  return start<float>(config, stream, comm, args);
}

gpu::Error load_kernels() {
  if (const gpu::Error error = load_for_dtype<float>(); error != gpu::kSuccess) return error;
  if (const gpu::Error error = load_for_dtype<BFloat16>(); error != gpu::kSuccess) return error;
  if (const gpu::Error error = load_for_dtype<Float16>(); error != gpu::kSuccess) return error;
  return gpu::load_kernel(reinterpret_cast<const void*>(&kernel<float, RaggedArgs>));
}

int64_t route_scratch(int num_experts) { return route_scratch_ints(num_experts, kMaxRanks); }

}  // namespace jax_ep
