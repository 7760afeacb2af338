// Products of which one operand is gathered.
#include "gemm/epilogue_gated.h"
#include "gemm/multiply_gathered.h"
#include "runtime/cuda/grouped_matmul_kernels.h"

namespace jax_ep::gemm {
namespace {

template <class In, class Out, bool kMn>
constexpr Variant<GroupedMatmulKernel> kRows{
    {kElement<In>, kElement<Out>, false, kMn, kMaxRows, /*swap_ab=*/true, Formula::store, Activation::none,
     Gathered::lhs},
    &grouped_matmul_kernel<GatheredRowsMainloop<In, SwappedMatrix<kMn, true>>, StoreSwapped<Out>>,
    int{sizeof(GatheredMemory<SwappedMemory>)}};

template <class T, Activation kActivation>
constexpr Variant<GroupedMatmulKernel> kGated{
    {kElement<T>, kElement<T>, false, true, kMaxRows, /*swap_ab=*/true, Formula::gated, kActivation, Gathered::lhs},
    &grouped_matmul_kernel<GatheredRowsMainloop<T, SwappedGateAndUp<true>>, StoreGated<T, kActivation>>,
    int{sizeof(GatheredMemory<SwappedMemory>)}};

template <class T, Gathered kGathered, class Store>
constexpr Variant<GroupedMatmulKernel> kContraction{{kElement<T>, kElement<T>, true, true, kGatheredColumns,
                                                     /*swap_ab=*/false, Formula::store, Activation::none, kGathered},
                                                    &grouped_matmul_kernel<GatheredContractionMainloop<T>, Store>,
                                                    int{sizeof(GatheredMemory<Shared<kGatheredColumns>>)}};

template <class Out>
constexpr Variant<GroupedMatmulKernel> kFloat8{{Element::float8, kElement<Out>, false, false, kFloat8Columns,
                                                /*swap_ab=*/false, Formula::store, Activation::none, Gathered::lhs},
                                               &grouped_matmul_kernel<GatheredFloat8Mainloop, StoreTile<Out>>,
                                               int{sizeof(GatheredFloat8Mainloop::Shared)}};

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
