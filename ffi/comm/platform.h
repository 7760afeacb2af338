// Chooses the platform this code is compiled for. No other file asks the compiler for it.
//
// A platform's header provides JAX_EP_FN and JAX_EP_CONSTANT_FN (function prefixes), JAX_EP_ROLLED (the loop must not
// be unrolled), loads and stores with memory order, clock_ns, pause, and Coop: a warp on a GPU, a thread on the CPU.
//
// The compiler of a file decides, not the library: a .cc file of the CUDA library sees the Coop of the CPU. So only
// kernels and .cu files may use `Coop` and constants that depend on it. Host code uses HardwareModel::warp_lanes.
#pragma once

namespace jax_ep {

// Hopper and newer copy in bulk through shared memory, and convert several values at a time.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
constexpr bool kHopper = true;
#else
constexpr bool kHopper = false;
#endif
#if defined(__CUDACC__) || defined(__HIP__)
constexpr bool kOnCpu = false;
#else
constexpr bool kOnCpu = true;
#endif

}  // namespace jax_ep

// JAX_EP_HAS_PTX: comm/platform/ptx and rows/movers/bulk.h compile.
#if defined(__CUDACC__)
#define JAX_EP_HAS_PTX 1
#include "comm/platform/cuda.h"
#elif defined(__HIP__)
#define JAX_EP_HAS_PTX 0
#include "comm/platform/hip.h"
#else
#define JAX_EP_HAS_PTX 0
#include "comm/platform/cpu.h"
#endif
