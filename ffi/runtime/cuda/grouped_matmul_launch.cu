// Starts any product: finds its kernel, and describes its arrays to TMA.
#include <array>
#include <utility>

#include "runtime/cuda/gemm_launch.h"
#include "runtime/cuda/grouped_matmul_launch.h"
#include "runtime/gpu/kernel_launch.h"

namespace jax_ep::gemm {
namespace {

std::array<FamilyKernels, 5> all_kernels() {
  return {Kernels<Family::tiles>::all(), Kernels<Family::swapped>::all(), Kernels<Family::gated>::all(),
          Kernels<Family::gathered>::all(), Kernels<Family::float8>::all()};
}

// An array of the product; null if it has none.
struct Array {
  const char* name;
  Matrices matrices;
  int box_rows;
  CUtensorMap* map;
};

std::optional<std::string> describe(const GroupedMatmul& x, Maps* maps) {
  const bool m_grouped = x.grouping == Grouping::m_grouped, k_grouped = x.grouping == Grouping::k_grouped;
  const auto lhs = [&](const void* data) {
    return k_grouped ? Matrices{data, x.operand_dtype, x.m, x.k, 1} : Matrices{data, x.operand_dtype, x.k, x.m, 1};
  };
  const auto rhs = [&](const void* data) {
    const int count = m_grouped ? x.groups : 1;
    return x.rhs_is_k_by_n ? Matrices{data, x.operand_dtype, x.columns, x.k, count}
                           : Matrices{data, x.operand_dtype, x.k, x.columns, count};
  };
  // TMA does not gather, nor store a result of float8.
  const void* const gathered_or_lhs = x.gathered == Gathered::none ? x.lhs : nullptr;
  const void* const out = x.dtype == Element::float8 ? nullptr : x.result;
  const Matrices result = x.is_transposed() ? Matrices{out, x.dtype, x.m, x.groups * x.n, 1}
                                            : Matrices{out, x.dtype, x.n, x.m, k_grouped ? x.groups : 1};
  for (const Array& array :
       {Array{"lhs", lhs(gathered_or_lhs), kSlice, &maps->lhs},
        Array{"second_lhs", lhs(x.second_lhs), kSlice, &maps->second_lhs}, Array{"rhs", rhs(x.rhs), kSlice, &maps->rhs},
        Array{"second_rhs", rhs(x.second_rhs), kSlice, &maps->second_rhs},
        Array{"result", result, kOutRows, &maps->result},
        Array{"first_product", {x.first_product, x.operand_dtype, x.columns, x.m, 1}, kOutRows, &maps->first_product},
        Array{
            "second_product", {x.second_product, x.operand_dtype, x.columns, x.m, 1}, kOutRows, &maps->second_product}})
    if (array.matrices.data)
      if (const auto error = describe_boxes(array.matrices, array.box_rows, array.map))
        return array.name + (": " + *error);
  return std::nullopt;
}

// The product as its kernel takes it: with the gathered operand on the left.
GroupedMatmul gathered_left(const GroupedMatmul& x) {
  GroupedMatmul product = x;
  if (x.is_transposed()) {
    std::swap(product.lhs, product.rhs);
    std::swap(product.m, product.n);
    product.columns = product.n;
  }
  return product;
}

}  // namespace

std::optional<std::string> launch(const GroupedMatmul& x, const Config& config, cudaStream_t stream) {
  const Form form{x.operand_dtype, x.dtype,        x.grouping == Grouping::k_grouped,
                  x.rhs_is_k_by_n, config.block_n, config.swap_ab,
                  x.formula,       x.activation,   x.gathered};
  const Variant<GroupedMatmulKernel>* variant = nullptr;
  for (const auto& kernels : all_kernels())
    if (!variant) variant = find(kernels.variants, form);
  if (!variant) return config.describe() + ": " + kNotCompiled;
  GroupedMatmul product = gathered_left(x);
  if (x.columns != x.n) product.second_product = x.first_product;  // which has both
  Maps maps;
  if (const auto error = describe(product, &maps)) return error;
  Problem problem{x.grouping, product.m,     product.n,  x.is_float8() ? x.k / 2 : x.k,
                  x.groups,   x.group_sizes, config.band};
  problem.split_k = config.split_k;
  problem.matrix = x.grouping == Grouping::k_grouped ? matrix_of(x.m, x.n) : matrix_of(x.k, x.n);
  const bool has_queue = config.swap_ab && !config.is_static;
  if (!has_queue) product.counter = nullptr;
  cudaError_t error = has_queue ? cudaMemsetAsync(x.counter, 0, sizeof(*x.counter), stream) : cudaSuccess;
  if (error == cudaSuccess) error = start(*variant, config.ctas, stream, maps, problem, product);
  return gpu::explain(error, config);
}

Config plan_tiles(const GroupedMatmul& x, int sms) {
  const GroupedMatmul product = gathered_left(x);
  return plan_tiles({x.grouping, product.m, product.n, x.k, x.groups, x.formula, x.is_float8(), x.gathered}, sms);
}

std::optional<std::string> launch(const GroupedMatmul& x, cudaStream_t stream) {
  int device = 0, sms = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  if (const auto why = gpu::explain(error)) return why;
  return launch(x, plan_tiles(x, sms), stream);
}

cudaError_t load() {
  for (const auto& kernels : all_kernels())
    if (const cudaError_t error = load_all(kernels.variants); error != cudaSuccess) return error;
  return cudaSuccess;
}

}  // namespace jax_ep::gemm

namespace jax_ep {

std::optional<std::string> start_local(gpu::Stream stream, const gemm::GroupedMatmul& args) {
  return gemm::launch(args, stream);
}

std::vector<uint64_t*> product_timelines(int device) {
  constexpr const char* kDoing = "looking for the timeline of products";
  const gpu::DeviceScope scope(device);
  bool hopper = false;
  gpu::check(gemm::is_hopper(&hopper), kDoing);
  std::vector<uint64_t*> words;
  if (!hopper) return words;
  for (const auto& kernels : gemm::all_kernels()) {
    void* word = nullptr;
    gpu::check(cudaGetSymbolAddress(&word, kernels.timeline), kDoing);
    words.push_back(static_cast<uint64_t*>(word));
  }
  return words;
}

}  // namespace jax_ep
