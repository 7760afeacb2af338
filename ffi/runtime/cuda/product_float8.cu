// Products and gated units of float8 operands.
#include "gemm/multiply_float8.h"
#include "gemm/multiply_gated_float8.h"
#include "runtime/cuda/product_kernels.h"

namespace jax_ep::gemm {
namespace {

template <class Out>
constexpr Variant<ProductKernel> kProduct{{Element::float8, kElement<Out>, false, false, kFloat8Columns},
                                          &product_kernel<Float8Mainloop<kFloat8Columns>, StoreTile<Out>>,
                                          int{sizeof(Shared<kFloat8Columns>)}};

template <Activation kActivation>
constexpr Variant<ProductKernel> kGated{
    {Element::float8, Element::float8, false, false, kScaleBlock, /*swap_ab=*/false, Formula::gated, kActivation},
    &product_kernel<GatedFloat8Mainloop, StoreGatedFloat8<kActivation>>,
    int{sizeof(GatedFloat8Memory)}};

constexpr std::array kKernels{kProduct<float>, kProduct<Bf16>, kGated<Activation::silu>, kGated<Activation::gelu>,
                              kGated<Activation::relu>};

}  // namespace

Variants<ProductKernel> float8_kernels() { return kKernels; }

}  // namespace jax_ep::gemm
