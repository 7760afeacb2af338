// The byte-wise kernels, and the launch of all kernels on rows. ffi/kernel_instances.cmake names the value kernels.
#include "runtime/gpu/define_kernels.h"

namespace jax_ep {
namespace {

__global__ void answer_with_time(ClockRequest* request, int questions) {
  constexpr uint64_t kTimeoutNs = 10'000'000'000;
  for (int question = 1; question <= questions; ++question) {
    if (spin_until(&request->asked, question, &request->cancelled, kTimeoutNs).status != Status::ok) return;
    store_relaxed(&request->ns, clock_ns());
    store_release(&request->answered, static_cast<uint64_t>(question));
  }
}

__global__ void mark(Marks* marks, bool begins, int32_t call) { set_mark(marks, begins, call); }

}  // namespace

#define JAX_EP_INSTANTIATE(Args) template struct Kernel<NoFormat, Args>;
JAX_EP_BYTE_KERNELS(JAX_EP_INSTANTIATE)

gpu::Error launch_clock(ClockRequest* request, int questions) {
  answer_with_time<<<1, 1>>>(request, questions);
  return gpu::take_last_error();
}

gpu::Error launch_mark(gpu::Stream stream, Marks* marks, bool begins, int32_t call) {
  mark<<<1, 1, 0, stream>>>(marks, begins, call);
  return gpu::take_last_error();
}

#define JAX_EP_ELSEWHERE(Args)                   \
  extern template struct Kernel<float, Args>;    \
  extern template struct Kernel<BFloat16, Args>; \
  extern template struct Kernel<Float16, Args>;
JAX_EP_VALUE_KERNELS(JAX_EP_ELSEWHERE)

template <class Args>
gpu::Error start_kernel(const LaunchConfig& config, gpu::Stream stream, const Comm& comm, const Args& args) {
  return with_kernel(args, comm.size, config.ctas, [&](auto format, const auto& kernel_args) {
    return Kernel<decltype(format), std::decay_t<decltype(kernel_args)>>::start(config, stream, comm, kernel_args);
  });
}
#define JAX_EP_START(Args) template gpu::Error start_kernel(const LaunchConfig&, gpu::Stream, const Comm&, const Args&);
JAX_EP_ROW_OPS(JAX_EP_START)

gpu::Error load_kernels(int shared_bytes) {
#define JAX_EP_LOAD_FOR_EACH(Args) \
  &Kernel<float, Args>::load, &Kernel<BFloat16, Args>::load, &Kernel<Float16, Args>::load,
#define JAX_EP_LOAD(Args) &Kernel<NoFormat, Args>::load,
  for (const auto load : {JAX_EP_VALUE_KERNELS(JAX_EP_LOAD_FOR_EACH) JAX_EP_BYTE_KERNELS(JAX_EP_LOAD)})
    if (const gpu::Error error = load(shared_bytes); error != gpu::kSuccess) return error;
  return gpu::load_kernel(reinterpret_cast<const void*>(&mark));
}

}  // namespace jax_ep
