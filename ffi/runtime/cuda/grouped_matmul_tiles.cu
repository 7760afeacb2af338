// Products in tiles of fixed height, for the dtypes and storage orders that Python calls.
#include "runtime/cuda/grouped_matmul_variant.h"

namespace jax_ep::gemm {
namespace {

template <class In, class Out, int kBlockN, bool kMnA, bool kMnB>
constexpr auto kKernel = variant<TileMainloop<In, kBlockN, kMnA, kMnB>, StoreTile<Out>>(
    {.in = kElement<In>, .out = kElement<Out>, .lhs_is_k_by_m = kMnA, .rhs_is_k_by_n = kMnB, .block_n = kBlockN});

// A gradient has the dtype of its operands: [m, k] times rhs transposed, or over groups of the contraction.
constexpr std::array kKernels{kKernel<Bf16, Bf16, 128, false, true>,  kKernel<Bf16, Bf16, 256, false, true>,
                              kKernel<Bf16, float, 128, false, true>, kKernel<Bf16, float, 256, false, true>,
                              kKernel<Bf16, Bf16, 128, false, false>, kKernel<Bf16, Bf16, 256, false, false>,
                              kKernel<Bf16, Bf16, 128, true, true>,   kKernel<Bf16, Bf16, 192, true, true>,
                              kKernel<Bf16, Bf16, 256, true, true>,   kKernel<F16, F16, 128, false, true>,
                              kKernel<F16, F16, 256, false, true>,    kKernel<F16, float, 128, false, true>,
                              kKernel<F16, float, 256, false, true>,  kKernel<F16, F16, 128, false, false>,
                              kKernel<F16, F16, 256, false, false>,   kKernel<F16, F16, 128, true, true>,
                              kKernel<F16, F16, 192, true, true>,     kKernel<F16, F16, 256, true, true>};

}  // namespace

Variants<GroupedMatmulKernel> tile_kernels() { return {kKernels, &product_timeline}; }

}  // namespace jax_ep::gemm
