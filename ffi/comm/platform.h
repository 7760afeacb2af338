// Chooses the target this code is compiled for. The only place that asks which platform it is.
//
// A target header provides JAX_EP_FN and JAX_EP_CONSTANT_FN (prefixes of functions), the memory-order verbs, clock_ns,
// pause, and Team: the unit that runs a kernel together, a warp on a GPU and a thread on the CPU.
#pragma once

// Hopper and newer copy in bulk through shared memory.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define JAX_EP_BULK_COPIES 1
#else
#define JAX_EP_BULK_COPIES 0
#endif

#if defined(__CUDACC__)
#include "comm/target/cuda.h"
#elif defined(__HIP__)
#include "comm/target/hip.h"
#else
#include "comm/target/host.h"
#endif
