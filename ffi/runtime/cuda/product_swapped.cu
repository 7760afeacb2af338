// Products with swapped operands, and sums of two of them.
#include "gemm/multiply_swapped.h"
#include "runtime/cuda/product_kernels.h"

namespace jax_ep::gemm {
namespace {

template <class In, class Out, bool kMn, Formula kFormula = Formula::store>
constexpr Variant<ProductKernel> kKernel{
    {kElement<In>, kElement<Out>, false, kMn, kMaxRows, /*swap_ab=*/true, kFormula},
    &product_kernel<SwappedMainloop<In, SwappedSource<SwappedMatrix<kMn, false, kFormula == Formula::summed ? 2 : 1>>>,
                    StoreSwapped<Out>>,
    int{sizeof(SwappedMemory)}};

constexpr std::array kKernels{kKernel<Bf16, Bf16, true>,  kKernel<Bf16, float, true>,
                              kKernel<Bf16, Bf16, false>, kKernel<Bf16, Bf16, false, Formula::summed>,
                              kKernel<F16, F16, true>,    kKernel<F16, float, true>,
                              kKernel<F16, F16, false>,   kKernel<F16, F16, false, Formula::summed>};

}  // namespace

Variants<ProductKernel> swapped_kernels() { return kKernels; }

}  // namespace jax_ep::gemm
