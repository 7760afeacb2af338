// all_gather_matmul for every dtype and storage order. Compiled for sm_90a alone.
#include "kernels/matmul/overlap.h"
#include "runtime/cuda/overlap_launch.h"

namespace jax_ep {

static RankProduct product_of(const GatherMatmulArgs& args, const Comm& comm) {
  return {args.m * comm.size, args.gathered, args.result, own_rows_first(args.m, comm.rank, comm.size)};
}

template struct OverlapKernel<GatherMatmulArgs>;

}  // namespace jax_ep
