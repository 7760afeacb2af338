// matmul_all_reduce and matmul_reduce_scatter for every dtype and storage order. Compiled for sm_90a alone.
#include "kernels/matmul/overlap_reduce.h"
#include "runtime/cuda/matmul.h"
#include "runtime/cuda/overlap_launch.h"
#include "runtime/gpu/kernel_launch.h"

namespace jax_ep {

std::optional<std::string> launch_matmul(const OverlapConfig& config, cudaStream_t stream, const Comm& comm,
                                         const MatmulReduceArgs& args) {
  if (config.communicating == 0) return launch_exchange(config, stream, comm, args);
  const PairOrder order{0, 0, args.scatter ? comm.size : 1};  // so that all owners have something to sum at any time
  return launch_overlapped(config, stream, comm, args, {args.m, args.a, args.partial}, order);
}

std::optional<std::string> launch_matmul(const HardwareModel& model, cudaStream_t stream, const Comm& comm,
                                         const MatmulReduceArgs& args) {
  return launch_matmul(plan(shape_of(args, comm.size), model), stream, comm, args);
}

cudaError_t load_matmul_reduce() {
  const cudaError_t error = load_matmul_exchange();
  return error == cudaSuccess ? load_overlapped<MatmulReduceArgs>() : error;
}

}  // namespace jax_ep
