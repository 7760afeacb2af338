// Chooses the platform this code is compiled for. No other file asks the compiler for it.
//
// A platform's header provides JAX_EP_FN and JAX_EP_CONSTANT_FN (prefixes of functions), JAX_EP_ROLLED (for a loop with
// a long body and few turns, which must not be unrolled), loads and stores with memory order, clock_ns, pause, and
// Coop. A coop runs a kernel together: a warp on a GPU, a thread on the CPU.
//
// The compiler of a file decides, not the library that the file is built into. In the library for CUDA a .cu file sees
// Coops of 32 lanes, and a .cc file, compiled by g++, those of the CPU, because device code does not compile there. So
// `Coop`, and constants that depend on it, are for kernels and .cu files. Host code asks HardwareModel::warp_lanes.
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

// JAX_EP_HAS_PTX: the platform has headers of its own (comm/platform/ptx, rows/movers/bulk.h) that others cannot read.
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
