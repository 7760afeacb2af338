// cuBLAS, where a library is found at run time; its headers are not needed.
#pragma once

#include <dlfcn.h>

#include "gemm_bench.h"

class Cublas {
 public:
  Cublas() {
    const char* named = std::getenv("CUBLAS");
    for (const char* name : {named ? named : "libcublas.so", "libcublas.so.13", "libcublas.so.12"})
      if (!library_) library_ = dlopen(name, RTLD_NOW | RTLD_GLOBAL);
    if (!library_) {
      std::printf("no cuBLAS: %s\n", dlerror());
      return;
    }
    const auto create = reinterpret_cast<int (*)(void**)>(dlsym(library_, "cublasCreate_v2"));
    gemm_ = reinterpret_cast<Gemm>(dlsym(library_, "cublasGemmEx"));
    if (!create || !gemm_ || create(&handle_)) std::printf("cuBLAS does not start\n"), gemm_ = nullptr;
  }

  // bfloat16 in and out. cuBLAS thinks in columns, so it computes the transpose: out' = b' x a'.
  void multiply(Buffers& buffers) const {
    if (!gemm_) return;
    const Case& c = buffers.of();
    const float one = 1, zero = 0;
    const int status = gemm_(handle_, c.mn_b ? kPlain : kTransposed, c.mn_a() ? kTransposed : kPlain, c.n, c.m, c.k,
                             &one, buffers.b, kBFloat16, c.mn_b ? c.n : c.k, buffers.a, kBFloat16, c.mn_a() ? c.m : c.k,
                             &zero, buffers.out, kBFloat16, c.n, kComputeFloat32, kDefault);
    if (status) std::printf("cuBLAS error %d\n", status);
  }

 private:
  using Gemm = int (*)(void*, int, int, int, int, int, const void*, const void*, int, int, const void*, int, int,
                       const void*, void*, int, int, int, int);
  static constexpr int kPlain = 0, kTransposed = 1, kBFloat16 = 14, kComputeFloat32 = 68, kDefault = -1;

  void* library_ = nullptr;
  void* handle_ = nullptr;
  Gemm gemm_ = nullptr;
};
