// Products and gated units of float8 operands.
#include "gemm/multiply_float8.h"
#include "gemm/multiply_gated_float8.h"
#include "runtime/cuda/grouped_matmul_kernels.h"

namespace jax_ep::gemm {
namespace {

template <class Out>
constexpr Variant<GroupedMatmulKernel> kProduct{{Element::float8, kElement<Out>, false, false, kFloat8Columns},
                                                &grouped_matmul_kernel<Float8Mainloop<kFloat8Columns>, StoreTile<Out>>,
                                                int{sizeof(Shared<kFloat8Columns>)}};

template <Activation kActivation>
constexpr Variant<GroupedMatmulKernel> kGated{
    {Element::float8, Element::float8, false, false, kScaleBlock, /*swap_ab=*/false, Formula::gated, kActivation},
    &grouped_matmul_kernel<GatedFloat8Mainloop, StoreGatedFloat8<kActivation>>,
    int{sizeof(GatedFloat8Memory)}};

constexpr std::array kKernels{kProduct<float>, kProduct<Bf16>, kGated<Activation::silu>, kGated<Activation::gelu>,
                              kGated<Activation::relu>};

}  // namespace

Variants<GroupedMatmulKernel> float8_kernels() { return {kKernels, &product_timeline}; }

}  // namespace jax_ep::gemm
