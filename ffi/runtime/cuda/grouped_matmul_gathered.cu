// Products of which one operand is gathered.
#include "gemm/epilogue_gated.h"
#include "runtime/cuda/grouped_matmul_variant.h"

namespace jax_ep::gemm {
namespace {

template <class In, class Out, bool kMn>
constexpr auto kRows =
    variant<GatheredRowsMainloop<In, SwappedMatrix<kMn, true>>, StoreSwapped<Out>>({.in = kElement<In>,
                                                                                    .out = kElement<Out>,
                                                                                    .rhs_is_k_by_n = kMn,
                                                                                    .block_n = kMaxRows,
                                                                                    .swap_ab = true,
                                                                                    .gathered = Gathered::lhs});

template <class T, Activation kActivation>
constexpr auto kGated =
    variant<GatheredRowsMainloop<T, SwappedGateAndUp<true>>, StoreGated<T, kActivation>>({.in = kElement<T>,
                                                                                          .out = kElement<T>,
                                                                                          .rhs_is_k_by_n = true,
                                                                                          .block_n = kMaxRows,
                                                                                          .swap_ab = true,
                                                                                          .formula = Formula::gated,
                                                                                          .activation = kActivation,
                                                                                          .gathered = Gathered::lhs});

template <class T, Gathered kGathered, class Store>
constexpr auto kContraction = variant<GatheredContractionMainloop<T>, Store>({.in = kElement<T>,
                                                                              .out = kElement<T>,
                                                                              .lhs_is_k_by_m = true,
                                                                              .rhs_is_k_by_n = true,
                                                                              .block_n = kGatheredColumns,
                                                                              .gathered = kGathered});

template <class Out>
constexpr auto kFloat8 = variant<GatheredFloat8Mainloop, StoreTile<Out>>(
    {.in = Element::float8, .out = kElement<Out>, .block_n = kFloat8Columns, .gathered = Gathered::lhs});

constexpr std::array kKernels{kFloat8<Bf16>,
                              kFloat8<float>,
                              kRows<Bf16, Bf16, true>,
                              kRows<Bf16, float, true>,
                              kRows<Bf16, Bf16, false>,
                              kGated<Bf16, Activation::silu>,
                              kGated<Bf16, Activation::gelu>,
                              kGated<Bf16, Activation::relu>,
                              kGated<Bf16, Activation::clamped_swiglu>,
                              kContraction<Bf16, Gathered::lhs, StoreTile<Bf16>>,
                              kContraction<Bf16, Gathered::rhs, StoreTransposed<Bf16>>,
                              kRows<F16, F16, true>,
                              kRows<F16, float, true>,
                              kRows<F16, F16, false>,
                              kGated<F16, Activation::silu>,
                              kGated<F16, Activation::gelu>,
                              kGated<F16, Activation::relu>,
                              kGated<F16, Activation::clamped_swiglu>,
                              kContraction<F16, Gathered::lhs, StoreTile<F16>>,
                              kContraction<F16, Gathered::rhs, StoreTransposed<F16>>};

}  // namespace

Variants<GroupedMatmulKernel> gathered_kernels() { return {kKernels, &product_timeline}; }

}  // namespace jax_ep::gemm
