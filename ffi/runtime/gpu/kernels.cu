// Launching the ops' kernels: those that look at no values are here, those on rows in row_kernels_*.cu.
#include "runtime/gpu/row_kernels.h"
#include "runtime/gpu/start_kernel.h"

namespace jax_ep {
namespace {

__global__ void answer_with_time(ClockFace* face, int questions) {
  constexpr uint64_t kTimeoutNs = 10'000'000'000;
  for (int question = 1; question <= questions; ++question) {
    if (spin_until(&face->asked, question, &face->cancelled, kTimeoutNs).status != Status::ok) return;
    store_relaxed(&face->ns, clock_ns());
    store_release(&face->answered, static_cast<uint64_t>(question));
  }
}

template <class Args>
gpu::Error start_any(const LaunchConfig& config, gpu::Stream stream, const Comm& comm, const Args& args) {
  switch (args.dtype) {
    case DType::float32:
      return RowKernels<float>::start(config, stream, comm, args);
    case DType::bfloat16:
      return RowKernels<BFloat16>::start(config, stream, comm, args);
    default:
      return RowKernels<Float16>::start(config, stream, comm, args);
  }
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
  return start_kernel<void>(config, stream, comm, args);
}
gpu::Error launch_kernel(const LaunchConfig& config, gpu::Stream stream, const Comm& comm,
                         const SparseUnionArgs& args) {
  return start_kernel<void>(config, stream, comm, args);
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
  for (const auto each : {&RowKernels<float>::load, &RowKernels<BFloat16>::load, &RowKernels<Float16>::load,
                          &load_kernel<void, RaggedArgs>, &load_kernel<void, SparseUnionArgs>})
    if (const gpu::Error error = each(shared_bytes); error != gpu::kSuccess) return error;
  return gpu::kSuccess;
}

}  // namespace jax_ep
