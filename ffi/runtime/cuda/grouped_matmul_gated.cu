// Gated units of 16-bit operands.
#include "gemm/epilogue_gated.h"
#include "runtime/cuda/grouped_matmul_variant.h"

namespace jax_ep::gemm {
namespace {

template <class T, Activation kActivation>
constexpr auto kKernel =
    variant<SwappedMainloop<T, SwappedGateAndUp<>>, StoreGated<T, kActivation>>({.in = kElement<T>,
                                                                                 .out = kElement<T>,
                                                                                 .rhs_is_k_by_n = true,
                                                                                 .block_n = kMaxRows,
                                                                                 .swap_ab = true,
                                                                                 .formula = Formula::gated,
                                                                                 .activation = kActivation});

constexpr std::array kKernels{kKernel<Bf16, Activation::silu>, kKernel<Bf16, Activation::gelu>,
                              kKernel<Bf16, Activation::relu>, kKernel<Bf16, Activation::clamped_swiglu>,
                              kKernel<F16, Activation::silu>,  kKernel<F16, Activation::gelu>,
                              kKernel<F16, Activation::relu>,  kKernel<F16, Activation::clamped_swiglu>};

}  // namespace

Variants<GroupedMatmulKernel> gated_kernels() { return {kKernels, &product_timeline}; }

}  // namespace jax_ep::gemm
