// Ends a benchmark at the first error of CUDA; memory, and kernels that fill it, multiply plainly or wait.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

inline void end_at_error(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::printf("ERROR %s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}
#define CHECK(call) end_at_error((call), #call)

// Calls run(device) for devices 0, 1, ..., each of which is the current one meanwhile.
template <class Run>
void on_each(int devices, Run run) {
  for (int device = 0; device < devices; ++device) {
    CHECK(cudaSetDevice(device));
    run(device);
  }
}

// Filled with 0xff, which is NaN in every float.
template <class T>
T* device_array(size_t count) {
  void* memory = nullptr;
  CHECK(cudaMalloc(&memory, std::max<size_t>(count, 1) * sizeof(T)));
  CHECK(cudaMemset(memory, 0xff, std::max<size_t>(count, 1) * sizeof(T)));
  return static_cast<T*>(memory);
}

template <class T>
T* upload(const std::vector<T>& host) {
  T* memory = device_array<T>(host.size());
  CHECK(cudaMemcpy(memory, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
  return memory;
}

template <class T>
std::vector<float> download(const void* data, size_t count) {
  std::vector<T> values(count);
  CHECK(cudaMemcpy(values.data(), data, count * sizeof(T), cudaMemcpyDeviceToHost));
  return {values.begin(), values.end()};
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

// One element a thread, and the sum of magnitudes by which its error is judged. Indices, where given, are of rows of
// `a` or of steps of the contraction.
template <class In>
__global__ void multiply_plainly(const In* a, const In* b, float* out, float* magnitude, int m, int n, int k,
                                 int64_t a_row, int64_t a_k, int64_t b_col, int64_t b_k, const int* rows_of_a,
                                 const int* steps_of_a, const int* steps_of_b, int source_rows) {
  const int col = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y;
  if (col >= n) return;
  float sum = 0, size = 0;
  for (int i = 0; i < k; ++i) {
    const int a_at = rows_of_a ? rows_of_a[row] : row, a_step = steps_of_a ? steps_of_a[i] : i,
              b_step = steps_of_b ? steps_of_b[i] : i;
    const int gathered = rows_of_a ? a_at : steps_of_a ? a_step : b_step;
    const bool gathers = rows_of_a || steps_of_a || steps_of_b, zero = gathers && gathered == -1,
               bad = gathers && !zero && (gathered < 0 || gathered >= source_rows);
    const float y = zero || bad ? 0 : float(a[a_at * a_row + a_step * a_k]) * float(b[col * b_col + b_step * b_k]);
    const float x = bad ? NAN : y;
    sum += x;
    size += fabsf(x);
  }
  out[size_t(row) * n + col] = sum;
  magnitude[size_t(row) * n + col] = size;
}

__device__ inline void wait_ns(uint64_t ns) {
  uint64_t start, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
  do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  while (now - start < ns);
}
static __global__ void delay(uint64_t ns) { wait_ns(ns); }
