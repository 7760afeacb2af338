// Ends a benchmark at the first error of CUDA; memory, and kernels that fill it or wait.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

inline void end_at_error(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::printf("ERROR %s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}
#define CHECK(call) end_at_error((call), #call)

// Filled with 0xff, which is NaN in every float.
template <class T>
T* device_array(size_t count) {
  void* memory = nullptr;
  CHECK(cudaMalloc(&memory, std::max<size_t>(count, 1) * sizeof(T)));
  CHECK(cudaMemset(memory, 0xff, std::max<size_t>(count, 1) * sizeof(T)));
  return static_cast<T*>(memory);
}

// Uniform in [-1, 1).
template <class T>
__global__ void fill(T* data, size_t count, uint32_t seed) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count; i += size_t{gridDim.x} * blockDim.x) {
    uint32_t x = static_cast<uint32_t>(i) * 2654435761u + seed;
    x = (x ^ x >> 16) * 0x7feb352du;
    x = (x ^ x >> 15) * 0x846ca68bu;
    data[i] = T(float((x ^ x >> 16) >> 8) / (1 << 23) - 1);
  }
}

__device__ inline void wait_ns(uint64_t ns) {
  uint64_t start, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
  do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  while (now - start < ns);
}
static __global__ void delay(uint64_t ns) { wait_ns(ns); }
