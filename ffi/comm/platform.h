// Chooses the target this code is compiled for. No other file asks the compiler which one that is.
//
// A target header provides JAX_EP_FN and JAX_EP_CONSTANT_FN (prefixes of functions), JAX_EP_ROLLED (of a loop whose
// body is long and would be repeated for each of its few turns), the memory-order verbs, clock_ns, pause, and Coop: the
// unit that runs a kernel together, a warp on a GPU and a thread on the CPU.
#pragma once

namespace jax_ep {

// Hopper and newer copy in bulk through shared memory, and convert several values at a time.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
constexpr bool kHopper = true;
#else
constexpr bool kHopper = false;
#endif

}  // namespace jax_ep

// JAX_EP_HAS_PTX: the target has headers of its own (comm/target/ptx, rows/target/bulk.h) that others cannot read.
#if defined(__CUDACC__)
#define JAX_EP_HAS_PTX 1
#include "comm/target/cuda.h"
#elif defined(__HIP__)
#define JAX_EP_HAS_PTX 0
#include "comm/target/hip.h"
#else
#define JAX_EP_HAS_PTX 0
#include "comm/target/host.h"
#endif
