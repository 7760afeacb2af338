// all_gather_matmul for every dtype and storage order. Compiled for sm_90a alone.
#include "kernels/matmul/overlap_gather.h"
#include "runtime/cuda/matmul.h"
#include "runtime/cuda/overlap_launch.h"
#include "runtime/gpu/kernel_launch.h"

namespace jax_ep {

std::optional<std::string> launch_matmul(const OverlapConfig& config, cudaStream_t stream, const Comm& comm,
                                         const GatherMatmulArgs& args) {
  return launch_overlapped(config, stream, comm, args, {args.m * comm.size, args.gathered, args.result},
                           own_rows_first(args.m, comm.rank, comm.size));
}

std::optional<std::string> launch_matmul(const HardwareModel& model, cudaStream_t stream, const Comm& comm,
                                         const GatherMatmulArgs& args) {
  return launch_matmul(plan(shape_of(args, comm.size), model), stream, comm, args);
}

cudaError_t load_gather_matmul() { return load_overlapped<GatherMatmulArgs>(); }

}  // namespace jax_ep
