// Products with swapped operands, and sums of two of them.
#include "runtime/cuda/grouped_matmul_variant.h"

namespace jax_ep::gemm {
namespace {

template <class In, class Out, bool kMn, Formula kFormula = Formula::store>
constexpr auto kKernel =
    variant<SwappedMainloop<In, SwappedMatrix<kMn, false, kFormula == Formula::summed ? 2 : 1>>, StoreSwapped<Out>>(
        {.in = kElement<In>,
         .out = kElement<Out>,
         .rhs_is_k_by_n = kMn,
         .block_n = kMaxRows,
         .swap_ab = true,
         .formula = kFormula});

constexpr std::array kKernels{kKernel<Bf16, Bf16, true>,  kKernel<Bf16, float, true>,
                              kKernel<Bf16, Bf16, false>, kKernel<Bf16, Bf16, false, Formula::summed>,
                              kKernel<F16, F16, true>,    kKernel<F16, float, true>,
                              kKernel<F16, F16, false>,   kKernel<F16, F16, false, Formula::summed>};

}  // namespace

Variants<GroupedMatmulKernel> swapped_kernels() { return {kKernels, &product_timeline}; }

}  // namespace jax_ep::gemm
