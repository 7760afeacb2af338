// Matrix products on Hopper, as the host calls them.
#pragma once

#include <cuda_runtime_api.h>

#include <optional>
#include <string>

#include "comm/dtype.h"
#include "gemm/plan.h"

namespace jax_ep::gemm {

// Row-major arrays without gaps. Dimensions and leading dimensions of 16-bit arrays are multiples of 8.
struct Arguments {
  Grouping grouping;
  int m, n, k, groups;  // as in Problem
  DType in, out;        // in: 16-bit; out: as in, or float32
  bool a_is_k_by_m;     // a is stored [k, m] rather than [m, k]
  bool b_is_k_by_n;     // b is stored [k, n] (of every group) rather than [n, k]
  const void* a;
  const void* b;
  void* out_data;
  const int32_t* group_sizes;  // on the device; null without groups
  uint32_t* counter;           // m-grouped: memory on the device, of this product alone while it runs
};

// Starts the product on the stream of the current device, or says why it cannot. May be captured in a CUDA graph.
std::optional<std::string> launch(const Arguments& arguments, const Config& config, cudaStream_t stream);

// With a config whose swap_ab is set.
std::optional<std::string> launch_swapped(const Arguments& arguments, const Config& config, cudaStream_t stream);

// As it is planned for the current device.
std::optional<std::string> launch(const Arguments& arguments, cudaStream_t stream);

enum class Activation { silu, gelu, relu };  // as in jax.nn, gelu by tanh

// activation(rows x gate) * (rows x up), both products rounded to the dtype before. Row-major arrays without gaps,
// whose dimensions are multiples of 8.
struct GatedArguments {
  int m, n, k, groups;
  DType dtype;  // of all, 16-bit
  Activation activation;
  const void* rows;       // [m, k]
  const void *gate, *up;  // [groups, k, columns]: the first n of gate, those of up from up_column on
  int columns, up_column;
  void* out_data;              // [m, n]
  const int32_t* group_sizes;  // on the device
  uint32_t* counter;           // memory on the device, of this product alone while it runs
};
std::optional<std::string> launch(const GatedArguments& arguments, cudaStream_t stream);

// A grouped product of float8 e4m3 operands. K and N are multiples of 128, row-major arrays without gaps.
struct Float8Arguments {
  int m, n, k, groups;
  DType out;                   // bfloat16 or float32
  const void* a;               // [m, k]
  const float* a_scales;       // [m, k / 128]
  const void* b;               // [groups, n, k]
  const float* b_scales;       // [groups, n / 128, k / 128]
  void* out_data;              // [m, n]
  const int32_t* group_sizes;  // on the device
};
std::optional<std::string> launch(const Float8Arguments& arguments, cudaStream_t stream);

// Loads every kernel on the current device, if it is a Hopper: a first launch would wait for a spinning kernel to end.
cudaError_t load();
cudaError_t load_swapped();
cudaError_t load_gated();
cudaError_t load_float8();

}  // namespace jax_ep::gemm
