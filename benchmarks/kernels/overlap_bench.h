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
#include "runtime/cuda/grouped_matmul_launch.h"
#include "runtime/gpu/kernel_launch.h"
#include "runtime/group.h"

using namespace jax_ep;

// Rows, contraction and columns of the product that one rank computes.
struct Shape {
  int m, k, n;
};

// One GPU: operands of all three ops, with room for float32 results.
struct Rank {
  Shape shape;
  int device;
  int ranks;
  bool transpose_rhs;
  char *a, *b, *gathered, *result, *partial;
  cudaStream_t stream{};

  // The rows of one rank; those of all must be as many as the product has, for a gather.
  Rank(Shape s, int rank, int ranks, bool transpose_rhs)
      : shape(s), device(rank), ranks(ranks), transpose_rhs(transpose_rhs) {
    CHECK(cudaSetDevice(rank));
    const int64_t a_count = int64_t{s.m} * s.k, b_count = int64_t{s.k} * s.n, count = int64_t{s.m} * s.n;
    a = device_array<char>(a_count * 2), gathered = device_array<char>(a_count * 2);
    b = device_array<char>(b_count * 2);
    result = device_array<char>(count * 4), partial = device_array<char>(count * 4);
    fill<<<1024, 256>>>(reinterpret_cast<__nv_bfloat16*>(a), a_count, 2 * rank + 1);
    fill<<<1024, 256>>>(reinterpret_cast<__nv_bfloat16*>(b), b_count, 2 * rank + 2);
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  }
  void release() {
    for (char* each : {a, b, gathered, result, partial}) CHECK(cudaFree(each));
    CHECK(cudaStreamDestroy(stream));
  }

  MatmulReduceArgs reduce_args(bool reduce_scatter, DType dtype) const {
    MatmulReduceArgs args{};
    args.dtype = dtype, args.operand_dtype = DType::bfloat16, args.transpose_rhs = transpose_rhs,
    args.reduce_scatter = reduce_scatter;
    args.m = shape.m, args.n = shape.n, args.k = shape.k;
    args.lhs = a, args.rhs = b, args.result = result, args.partial = partial;
    return args;
  }
  // `a` holds the rows of this rank first.
  AllGatherMatmulArgs gather_args(DType dtype) const {
    AllGatherMatmulArgs args{};
    args.dtype = dtype, args.operand_dtype = DType::bfloat16, args.transpose_rhs = transpose_rhs;
    args.m = shape.m / ranks, args.n = shape.n, args.k = shape.k;
    args.lhs = a, args.rhs = b, args.result = result, args.gathered = gathered;
    return args;
  }
};

inline std::vector<float> download_as(DType dtype, const void* data, int64_t count) {
  return dtype == DType::float32 ? download<float>(data, count) : download<__nv_bfloat16>(data, count);
}

// The product of the first `m` rows of one rank with the matrix of another.
inline std::vector<float> exact_product(const Rank& rows, const Rank& matrix, int matrix_rank, int m) {
  CHECK(cudaSetDevice(matrix_rank));
  const Shape s = matrix.shape;
  const int64_t count = int64_t{m} * s.n;
  float *out = device_array<float>(count), *magnitude = device_array<float>(count);
  __nv_bfloat16* here = device_array<__nv_bfloat16>(int64_t{m} * s.k);
  CHECK(cudaMemcpy(here, rows.a, int64_t{m} * s.k * 2, cudaMemcpyDefault));
  const int64_t b_col = matrix.transpose_rhs ? s.k : 1, b_k = matrix.transpose_rhs ? 1 : s.n;
  multiply_plainly<<<dim3((s.n + 127) / 128, m), 128>>>(here, reinterpret_cast<__nv_bfloat16*>(matrix.b), out,
                                                        magnitude, m, s.n, s.k, s.k, 1, b_col, b_k, nullptr, nullptr,
                                                        nullptr, 0);
  CHECK(cudaDeviceSynchronize());
  const std::vector<float> values = download<float>(out, count);
  CHECK(cudaFree(out));
  CHECK(cudaFree(magnitude));
  CHECK(cudaFree(here));
  return values;
}
