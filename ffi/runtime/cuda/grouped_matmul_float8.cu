// Products and gated units of float8 operands.
#include "gemm/epilogue_gated.h"
#include "runtime/cuda/grouped_matmul_variant.h"

namespace jax_ep::gemm {
namespace {

template <class Out>
constexpr auto kProduct =
    variant<Float8Mainloop, StoreTile<Out>>({.in = Element::float8, .out = kElement<Out>, .block_n = kFloat8Columns});

template <Activation kActivation>
constexpr auto kGated = variant<GatedFloat8Mainloop, StoreGatedFloat8<kActivation>>({.in = Element::float8,
                                                                                     .out = Element::float8,
                                                                                     .block_n = kScaleBlock,
                                                                                     .formula = Formula::gated,
                                                                                     .activation = kActivation});

constexpr std::array kKernels{kProduct<float>, kProduct<Bf16>, kGated<Activation::silu>, kGated<Activation::gelu>,
                              kGated<Activation::relu>};

}  // namespace

Variants<GroupedMatmulKernel> float8_kernels() { return {kKernels, &product_timeline}; }

}  // namespace jax_ep::gemm
