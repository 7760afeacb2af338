// All ops, and the choice of the instantiation that fits the rows' dtype.
#pragma once

#include "kernels/matmul/gather.h"
#include "kernels/matmul/reduce.h"
#include "kernels/moe/combine.h"
#include "kernels/moe/dispatch.h"
#include "kernels/moe/scatter.h"
#include "kernels/ragged/ragged_all_to_all.h"
#include "kernels/sparse/reduce.h"
#include "kernels/sparse/union.h"

namespace jax_ep {

template <class Args>
JAX_EP_FN void run_any(const Comm& comm, const Args& args, const Team& team) {
  switch (args.dtype) {
    case DType::float32:
      return run_kernel<float>(comm, args, team);
    case DType::bfloat16:
      return run_kernel<BFloat16>(comm, args, team);
    case DType::float16:
      return run_kernel<Float16>(comm, args, team);
  }
}

// Ops that look at no values.
JAX_EP_FN void run_any(const Comm& comm, const RaggedArgs& args, const Team& team) { run_kernel(comm, args, team); }
JAX_EP_FN void run_any(const Comm& comm, const SparseUnionArgs& args, const Team& team) {
  run_kernel(comm, args, team);
}

}  // namespace jax_ep
