// Gated units of 16-bit operands.
#include "gemm/epilogue_gated.h"
#include "gemm/multiply_swapped.h"
#include "runtime/cuda/grouped_matmul_kernels.h"

namespace jax_ep::gemm {
namespace {

template <class T, Activation kActivation>
constexpr Variant<GroupedMatmulKernel> kKernel{
    {kElement<T>, kElement<T>, false, true, kMaxRows, /*swap_ab=*/true, Formula::gated, kActivation},
    &grouped_matmul_kernel<SwappedMainloop<T, SwappedSource<SwappedGateAndUp<>>>, StoreGated<T, kActivation>>,
    int{sizeof(SwappedMemory)}};

constexpr std::array kKernels{kKernel<Bf16, Activation::silu>, kKernel<Bf16, Activation::gelu>,
                              kKernel<Bf16, Activation::relu>, kKernel<Bf16, Activation::clamped_swiglu>,
                              kKernel<F16, Activation::silu>,  kKernel<F16, Activation::gelu>,
                              kKernel<F16, Activation::relu>,  kKernel<F16, Activation::clamped_swiglu>};

}  // namespace

Variants<GroupedMatmulKernel> gated_kernels() { return {kKernels, &product_timeline}; }

}  // namespace jax_ep::gemm
