// Functions that launch kernels, declared without device code, so that only the .cu files need its compiler.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "comm/marks.h"
#include "comm/timeline.h"
#include "kernels/collective_matmul/plan.h"
#include "kernels/grouped_matmul/args.h"
#include "kernels/moe/args.h"
#include "kernels/plan.h"
#include "platform/runtime.h"

namespace jax_ep {

// The limit on the parameters of a launch, besides tensor maps. A launch copies its parameters, and all coops read them
// from cold memory.
constexpr std::size_t kMaxParameterBytes = 1024;

// The bytes of a kernel's parameters, with their alignment.
template <class... Parameters>
constexpr std::size_t parameter_bytes() {
  std::size_t end = 0;
  ((end = (end + alignof(Parameters) - 1) / alignof(Parameters) * alignof(Parameters) + sizeof(Parameters)), ...);
  return end;
}

// Starts the kernel of an op on rows, for the dtype of its rows. Defined in kernels.cu.
template <class Args>
gpu::Error start_kernel(const LaunchConfig& config, gpu::Stream stream, const Comm& comm, const Args& args);

// Loads every kernel of the ops on rows on the current device, with `shared_bytes` of shared memory for each CTA.
// Without it, the first launch of a kernel would wait for a spinning kernel to end.
gpu::Error load_kernels(int shared_bytes);

// Starts a local op, or says why it cannot. May be captured in a graph. Only the library for CUDA has local ops.
std::optional<std::string> start_local(gpu::Stream stream, const gemm::GroupedMatmul& args);

// The kernel of a collective matmul, which only the library for CUDA has. Defined in overlap_launch.h.
template <class Args>
struct OverlapKernel {
  // Starts the kernel, or says why it cannot. May be captured in a graph.
  static std::optional<std::string> start(const OverlapConfig& config, gpu::Stream stream, const Comm& comm,
                                          const Args& args);
  // On the current device, if it is a Hopper.
  static gpu::Error load();
};

// Loads the kernels of the matmuls on the current device, or says why that failed. This and product_timelines are
// defined in runtime/cuda, and in bindings/no_matmuls.cc for HIP.
std::optional<std::string> load_matmul_kernels();

// Products::timelines (runtime/profiler.h).
std::vector<uint64_t*> product_timelines(int device);

// Starts a kernel that answers `questions` of the host for the time of the current device, on its default stream.
gpu::Error launch_clock(ClockRequest* request, int questions);

// Starts a kernel that marks a call. May be captured in a graph.
gpu::Error launch_mark(gpu::Stream stream, Marks* marks, bool begins, int32_t call);

}  // namespace jax_ep
