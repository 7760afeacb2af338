// Ends a benchmark at the first error of CUDA.
#pragma once

#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>

inline void end_at_error(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::printf("ERROR %s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}
#define CHECK(call) end_at_error((call), #call)
