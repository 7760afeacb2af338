// What all launches of matrix products have in common: which kernels there are, and how one starts.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <span>
#include <type_traits>

#include "gemm/grouped_matmul.h"
#include "gemm/layout.h"
#include "gemm/problem.h"
#include "gemm/tensor_map.h"
#include "runtime/gpu/device_scope.h"

namespace jax_ep::gemm {

using Bf16 = __nv_bfloat16;
using F16 = __half;

// The dtype of values in a kernel.
template <class T>
constexpr Element kElement = std::is_same_v<T, float>           ? Element::float32
                             : std::is_same_v<T, __half>        ? Element::float16
                             : std::is_same_v<T, __nv_bfloat16> ? Element::bfloat16
                                                                : Element::float8;

// The properties by which the host finds a kernel.
struct Form {
  Element in, out;
  bool lhs_is_k_by_m = false, rhs_is_k_by_n = false;
  int block_n;  // as in Config
  bool swap_ab = false;
  Formula formula = Formula::store;
  Activation activation = Activation::none;
  Gathered gathered = Gathered::none;

  bool operator==(const Form&) const = default;
};

template <class Kernel>
struct Variant {
  Form form;
  Kernel kernel;
  int shared_bytes;
};

template <class Kernel>
using Variants = std::span<const Variant<Kernel>>;

constexpr const char* kNotCompiled = "no kernel is compiled for these dtypes, storage orders and tiles";

template <class Kernel>
const Variant<Kernel>* find(Variants<Kernel> all, const Form& form) {
  for (const auto& variant : all)
    if (variant.form == form) return &variant;
  return nullptr;
}

// Sets `found`: whether the current device is a Hopper.
inline cudaError_t is_hopper(bool* found) {
  int device = 0, major = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  *found = major == 9;
  return error;
}

// Loads kernels on the current device, if it is a Hopper.
template <class Kernel>
cudaError_t load_all(Variants<Kernel> all) {
  bool hopper = false;
  cudaError_t error = is_hopper(&hopper);
  if (error != cudaSuccess || !hopper) return error;
  for (const auto& variant : all)
    if (error == cudaSuccess) error = gpu::load_kernel(reinterpret_cast<const void*>(variant.kernel));
  return error;
}

template <class... Parameters, class... Arguments>
cudaError_t start(const Variant<void (*)(Parameters...)>& variant, int ctas, cudaStream_t stream,
                  const Arguments&... arguments) {
  const cudaError_t error = gpu::allow_shared(reinterpret_cast<const void*>(variant.kernel), variant.shared_bytes);
  if (error != cudaSuccess) return error;
  cudaLaunchConfig_t launch{};
  launch.gridDim = dim3(ctas);
  launch.blockDim = dim3(kThreads);
  launch.dynamicSmemBytes = variant.shared_bytes;
  launch.stream = stream;
  return cudaLaunchKernelEx(&launch, variant.kernel, arguments...);
}

// The kernels of grouped products, in families: grouped_matmul_tables.h lists them.
using GroupedMatmulKernel = void (*)(Maps, Problem, GroupedMatmul);

enum class Family { tiles, swapped, gated, gathered, float8 };

struct FamilyKernels {
  Variants<GroupedMatmulKernel> variants;
  const void* timeline;  // their `product_timeline` (gemm/kernel.h)
};
template <Family>
struct Kernels {
  static FamilyKernels all();
};

}  // namespace jax_ep::gemm
