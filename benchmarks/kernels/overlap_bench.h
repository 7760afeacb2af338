// What overlap_bench needs around the kernels: GPUs as ranks, their operands, and exact results.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "check.h"
#include "runtime/cuda/product_launch.h"
#include "runtime/gpu/kernel_launch.h"
#include "runtime/group.h"

using namespace jax_ep;

// Rows, contraction and columns of the product that one rank computes.
struct Shape {
  int m, k, n;
};

// out [m, n] = a [m, k] x b, one thread a value.
__global__ void multiply_naively(const __nv_bfloat16* a, const __nv_bfloat16* b, float* out, int m, int k, int n,
                                 bool transpose_rhs) {
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x, row = i / n, column = i % n;
  if (row >= m) return;
  float sum = 0;
  for (int j = 0; j < k; ++j)
    sum += __bfloat162float(a[row * k + j]) *
           __bfloat162float(transpose_rhs ? b[column * k + j] : b[int64_t{j} * n + column]);
  out[i] = sum;
}

inline unsigned blocks_of(int64_t count) { return static_cast<unsigned>((count + 255) / 256); }

// One GPU: operands of all three ops, with room for float32 results.
struct Rank {
  Shape shape;
  int device;
  int ranks;
  bool transpose_rhs;
  __nv_bfloat16 *a, *b, *gathered;
  char *result, *partial;
  cudaStream_t stream{};

  // The rows of one rank; those of all must be as many as the product has, for a gather.
  Rank(Shape s, int rank, int ranks, bool transpose_rhs)
      : shape(s), device(rank), ranks(ranks), transpose_rhs(transpose_rhs) {
    CHECK(cudaSetDevice(rank));
    a = device_array<__nv_bfloat16>(int64_t{s.m} * s.k);
    b = device_array<__nv_bfloat16>(int64_t{s.k} * s.n);
    gathered = device_array<__nv_bfloat16>(int64_t{s.m} * s.k);
    result = device_array<char>(int64_t{s.m} * s.n * 4);
    partial = device_array<char>(int64_t{s.m} * s.n * 4);
    fill<<<1024, 256>>>(a, int64_t{s.m} * s.k, 2 * rank + 1);
    fill<<<1024, 256>>>(b, int64_t{s.k} * s.n, 2 * rank + 2);
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  }
  // A copy of this rank with other rows in `a`.
  Rank with_rows(uint32_t seed) const {
    Rank other = *this;
    CHECK(cudaSetDevice(device));
    other.a = device_array<__nv_bfloat16>(int64_t{shape.m} * shape.k);
    fill<<<1024, 256>>>(other.a, int64_t{shape.m} * shape.k, 2 * seed + 1);
    CHECK(cudaDeviceSynchronize());
    return other;
  }
  void release() {
    for (void* each : {static_cast<void*>(a), static_cast<void*>(b), static_cast<void*>(gathered),
                       static_cast<void*>(result), static_cast<void*>(partial)})
      CHECK(cudaFree(each));
    CHECK(cudaStreamDestroy(stream));
  }

  MatmulReduceArgs reduce_args(bool reduce_scatter, DType dtype) const {
    MatmulReduceArgs args{};
    args.dtype = dtype, args.operand_dtype = DType::bfloat16, args.transpose_rhs = transpose_rhs,
    args.reduce_scatter = reduce_scatter;
    args.m = shape.m, args.n = shape.n, args.k = shape.k;
    args.lhs = reinterpret_cast<char*>(a), args.rhs = reinterpret_cast<char*>(b);
    args.result = result, args.partial = partial;
    return args;
  }
  // `a` holds the rows of this rank first.
  GatherMatmulArgs gather_args(DType dtype) const {
    GatherMatmulArgs args{};
    args.dtype = dtype, args.operand_dtype = DType::bfloat16, args.transpose_rhs = transpose_rhs;
    args.m = shape.m / ranks, args.n = shape.n, args.k = shape.k;
    args.lhs = reinterpret_cast<char*>(a), args.rhs = reinterpret_cast<char*>(b);
    args.result = result, args.gathered = reinterpret_cast<char*>(gathered);
    return args;
  }
};

inline std::vector<float> download(const char* from, int64_t count, DType dtype) {
  std::vector<float> values(count);
  if (dtype == DType::float32) {
    CHECK(cudaMemcpy(values.data(), from, count * 4, cudaMemcpyDeviceToHost));
    return values;
  }
  std::vector<__nv_bfloat16> narrow(count);
  CHECK(cudaMemcpy(narrow.data(), from, count * 2, cudaMemcpyDeviceToHost));
  for (int64_t i = 0; i < count; ++i) values[i] = __bfloat162float(narrow[i]);
  return values;
}

// The product of the first `m` rows of one rank with the matrix of another.
inline std::vector<float> exact_product(const Rank& rows, const Rank& matrix, int matrix_rank, int m) {
  CHECK(cudaSetDevice(matrix_rank));
  const Shape s = matrix.shape;
  float* out = device_array<float>(int64_t{m} * s.n);
  __nv_bfloat16* here = device_array<__nv_bfloat16>(int64_t{m} * s.k);
  CHECK(cudaMemcpy(here, rows.a, int64_t{m} * s.k * 2, cudaMemcpyDefault));
  multiply_naively<<<blocks_of(int64_t{m} * s.n), 256>>>(here, matrix.b, out, m, s.k, s.n, matrix.transpose_rhs);
  CHECK(cudaDeviceSynchronize());
  const std::vector<float> values = download(reinterpret_cast<char*>(out), int64_t{m} * s.n, DType::float32);
  CHECK(cudaFree(out));
  CHECK(cudaFree(here));
  return values;
}
