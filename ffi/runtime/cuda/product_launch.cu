// Starts any product: finds its kernel, and describes its arrays to TMA.
#include <initializer_list>

#include "gemm/gemm.h"
#include "gemm/tensor_map.h"
#include "runtime/cuda/product_kernels.h"

namespace jax_ep::gemm {
namespace {

// An array of the product; null if it has none.
struct Array {
  const char* name;
  Matrices matrices;
  int lines;  // of a box
  CUtensorMap* map;
};

std::optional<std::string> describe(const Product& x, Maps* maps) {
  const bool m_grouped = x.grouping == Grouping::m_grouped, k_grouped = x.grouping == Grouping::k_grouped;
  const auto lhs = [&](const void* data) {
    return k_grouped ? Matrices{data, x.in, x.m, x.k, 1} : Matrices{data, x.in, x.k, x.m, 1};
  };
  const auto rhs = [&](const void* data) {
    const int count = m_grouped ? x.groups : 1;
    return x.rhs_is_k_by_n ? Matrices{data, x.in, x.columns, x.k, count} : Matrices{data, x.in, x.k, x.columns, count};
  };
  // TMA does not store a result of float8.
  const void* const result = x.out == Element::float8 ? nullptr : x.result;
  for (const Array& array :
       {Array{"lhs", lhs(x.lhs), kSlice, &maps->lhs}, Array{"second_lhs", lhs(x.second_lhs), kSlice, &maps->second_lhs},
        Array{"rhs", rhs(x.rhs), kSlice, &maps->rhs}, Array{"second_rhs", rhs(x.second_rhs), kSlice, &maps->second_rhs},
        Array{"result", {result, x.out, x.n, x.m, k_grouped ? x.groups : 1}, kOutRows, &maps->result},
        Array{"first_product", {x.first_product, x.in, x.columns, x.m, 1}, kOutRows, &maps->first_product},
        Array{"second_product", {x.second_product, x.in, x.columns, x.m, 1}, kOutRows, &maps->second_product}})
    if (array.matrices.data)
      if (const auto error = describe_boxes(array.matrices, array.lines, array.map))
        return array.name + (": " + *error);
  return std::nullopt;
}

}  // namespace

std::optional<std::string> launch(const Product& x, const Config& config, cudaStream_t stream) {
  const Form form{
      x.in,       x.out,       x.grouping == Grouping::k_grouped, x.rhs_is_k_by_n, config.block_n, config.swap_ab,
      x.epilogue, x.activation};
  const Variant<ProductKernel>* chosen = nullptr;
  for (const auto& kernels : {tile_kernels(), swapped_kernels(), gated_kernels(), float8_kernels()})
    if (!chosen) chosen = find(kernels, form);
  if (!chosen) return kNotCompiled;
  Product product = x;
  if (x.keeps_products && x.columns != x.n) product.second_product = x.first_product;  // one array has both
  Maps maps;
  if (const auto error = describe(product, &maps)) return error;
  Problem problem{x.grouping, x.m, x.n, x.is_float8() ? x.k / 2 : x.k, x.groups, x.group_sizes, config.band};
  problem.split_k = config.split_k;
  cudaError_t error = config.swap_ab ? cudaMemsetAsync(x.counter, 0, sizeof(*x.counter), stream) : cudaSuccess;
  if (error == cudaSuccess) error = start(*chosen, config.blocks, stream, maps, problem, product);
  const auto said = describe_error(error);
  return said ? std::optional(config.describe() + ": " + *said) : std::nullopt;
}

std::optional<std::string> launch(const Product& x, cudaStream_t stream) {
  int device = 0, sms = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  if (const auto said = describe_error(error)) return said;
  return launch(x, plan({x.grouping, x.m, x.n, x.k, x.groups, x.epilogue, x.is_float8()}, sms), stream);
}

cudaError_t load() {
  for (const auto& kernels : {tile_kernels(), swapped_kernels(), gated_kernels(), float8_kernels()})
    if (const cudaError_t error = load_all(kernels); error != cudaSuccess) return error;
  return cudaSuccess;
}

}  // namespace jax_ep::gemm
