// matmul_all_reduce and matmul_reduce_scatter of two ranks, for every dtype and storage order. Compiled for sm_90a
// alone.
#include "kernels/matmul/overlap_exchange.h"
#include "runtime/cuda/matmul.h"
#include "runtime/cuda/overlap_launch.h"

namespace jax_ep {

std::optional<std::string> launch_exchange(const OverlapConfig& config, cudaStream_t stream, const Comm& comm,
                                           const MatmulReduceArgs& args) {
  const PairOrder order{0, 0, args.scatter ? comm.size : 1};  // so that both ranks have something to add at any time
  return launch_overlapped(config, stream, comm, MatmulExchangeArgs{args}, {args.m, args.a, args.partial}, order);
}

cudaError_t load_matmul_exchange() { return load_overlapped<MatmulExchangeArgs>(); }

}  // namespace jax_ep
