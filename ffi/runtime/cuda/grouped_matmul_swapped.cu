// Products with swapped operands, and sums of two of them.
#include "gemm/multiply_swapped.h"
#include "runtime/cuda/grouped_matmul_kernels.h"

namespace jax_ep::gemm {
namespace {

template <class In, class Out, bool kMn, Formula kFormula = Formula::store>
constexpr Variant<GroupedMatmulKernel> kKernel{
    {kElement<In>, kElement<Out>, false, kMn, kMaxRows, /*swap_ab=*/true, kFormula},
    &grouped_matmul_kernel<
        SwappedMainloop<In, SwappedSource<SwappedMatrix<kMn, false, kFormula == Formula::summed ? 2 : 1>>>,
        StoreSwapped<Out>>,
    int{sizeof(SwappedMemory)}};

constexpr std::array kKernels{kKernel<Bf16, Bf16, true>,  kKernel<Bf16, float, true>,
                              kKernel<Bf16, Bf16, false>, kKernel<Bf16, Bf16, false, Formula::summed>,
                              kKernel<F16, F16, true>,    kKernel<F16, float, true>,
                              kKernel<F16, F16, false>,   kKernel<F16, F16, false, Formula::summed>};

}  // namespace

Variants<GroupedMatmulKernel> swapped_kernels() { return {kKernels, &product_timeline}; }

}  // namespace jax_ep::gemm
