// Backward through gated units of 16-bit operands.
#include "gemm/epilogue_d_gated.h"
#include "gemm/multiply_gathered.h"
#include "runtime/cuda/product_kernels.h"

namespace jax_ep::gemm {
namespace {

constexpr Form form(Element element, Gathered gathered) {
  return {element, element, false, false, kMostRows, /*swap_ab=*/true, Epilogue::d_gated, Activation::none, gathered};
}

template <class T>
constexpr Variant<ProductKernel> kKernel{
    form(kElement<T>, Gathered::none),
    &product_kernel<SwappedMainloop<T, SwappedSource<SwappedMatrix<false>>>, StoreDGated<T>>,
    int{sizeof(SwappedMemory)}};
template <class T>
constexpr Variant<ProductKernel> kGathered{
    form(kElement<T>, Gathered::lhs),
    &product_kernel<GatheredRowsMainloop<T, SwappedMatrix<false, true>>, StoreDGated<T>>,
    int{sizeof(GatheredMemory<SwappedMemory>)}};

constexpr std::array kKernels{kKernel<Bf16>, kKernel<F16>, kGathered<Bf16>, kGathered<F16>};

}  // namespace

Variants<ProductKernel> d_gated_kernels() { return kKernels; }

}  // namespace jax_ep::gemm
