// Every compiled kernel of grouped products. ffi/kernel_instances.cmake makes a file for each family, so that they
// compile in parallel.
#pragma once

#include <array>

#include "gemm/epilogue_gated.h"
#include "gemm/mainloops.h"
#include "runtime/cuda/gemm_launch.h"

namespace jax_ep::gemm {

template <class Loop, class Epilogue>
constexpr Variant<GroupedMatmulKernel> variant(const Form& form) {
  return {form, &grouped_matmul_kernel<Loop, Epilogue>, int{sizeof(typename Loop::template Memory<>)}};
}

// The kernels of a family, for operands of dtypes T. Each entry depends on T. An entry that did not would be compiled
// in the file of every family.
template <Family, class... T>
constexpr std::array<Variant<GroupedMatmulKernel>, 0> kTable{};

template <class In, class Out, int kBlockN, bool kMnA, bool kMnB>
constexpr auto kTile = variant<TileMainloop<In, kBlockN, kMnA, kMnB>, StoreTile<Out>>(
    {.in = kElement<In>, .out = kElement<Out>, .lhs_is_k_by_m = kMnA, .rhs_is_k_by_n = kMnB, .block_n = kBlockN});

// In tiles of fixed height, for the dtypes and storage orders that Python calls. A gradient has the dtype of its
// operands: [m, k] times rhs transposed, or over groups of the contraction.
template <class... T>
constexpr std::array kTable<Family::tiles, T...>{
    kTile<T, T, 128, false, true>...,     kTile<T, T, 256, false, true>...,  kTile<T, float, 128, false, true>...,
    kTile<T, float, 256, false, true>..., kTile<T, T, 128, false, false>..., kTile<T, T, 256, false, false>...,
    kTile<T, T, 128, true, true>...,      kTile<T, T, 192, true, true>...,   kTile<T, T, 256, true, true>...};

template <class In, class Weights, Gathered kGathered>
using RowsMainloop =
    std::conditional_t<kGathered == Gathered::none, SwappedMainloop<In, Weights>, GatheredRowsMainloop<In, Weights>>;

template <class In, class Out, bool kMn, Formula kFormula = Formula::store, Gathered kGathered = Gathered::none>
constexpr auto kRows = variant<
    RowsMainloop<In, SwappedMatrix<kMn, kGathered != Gathered::none, kFormula == Formula::summed ? 2 : 1>, kGathered>,
    StoreSwapped<Out>>({.in = kElement<In>,
                        .out = kElement<Out>,
                        .rhs_is_k_by_n = kMn,
                        .block_n = kMaxRows,
                        .swap_ab = true,
                        .formula = kFormula,
                        .gathered = kGathered});

template <class T, Activation kActivation, Gathered kGathered = Gathered::none>
constexpr auto kGated =
    variant<RowsMainloop<T, SwappedGateAndUp<kGathered != Gathered::none>, kGathered>, StoreGated<T, kActivation>>(
        {.in = kElement<T>,
         .out = kElement<T>,
         .rhs_is_k_by_n = true,
         .block_n = kMaxRows,
         .swap_ab = true,
         .formula = Formula::gated,
         .activation = kActivation,
         .gathered = kGathered});

// With swapped operands, and sums of two of them.
template <class... T>
constexpr std::array kTable<Family::swapped, T...>{kRows<T, T, true>..., kRows<T, float, true>...,
                                                   kRows<T, T, false>..., kRows<T, T, false, Formula::summed>...};

template <class... T>
constexpr std::array kTable<Family::gated, T...>{kGated<T, Activation::silu>..., kGated<T, Activation::gelu>...,
                                                 kGated<T, Activation::relu>...,
                                                 kGated<T, Activation::clamped_swiglu>...};

template <class T, Gathered kGathered, class Store>
constexpr auto kGatheredContraction = variant<GatheredContractionMainloop<T>, Store>({.in = kElement<T>,
                                                                                      .out = kElement<T>,
                                                                                      .lhs_is_k_by_m = true,
                                                                                      .rhs_is_k_by_n = true,
                                                                                      .block_n = kGatheredColumns,
                                                                                      .gathered = kGathered});

// One operand is gathered.
template <class... T>
constexpr std::array kTable<Family::gathered, T...>{kRows<T, T, true, Formula::store, Gathered::lhs>...,
                                                    kRows<T, float, true, Formula::store, Gathered::lhs>...,
                                                    kRows<T, T, false, Formula::store, Gathered::lhs>...,
                                                    kGated<T, Activation::silu, Gathered::lhs>...,
                                                    kGated<T, Activation::gelu, Gathered::lhs>...,
                                                    kGated<T, Activation::relu, Gathered::lhs>...,
                                                    kGated<T, Activation::clamped_swiglu, Gathered::lhs>...,
                                                    kGatheredContraction<T, Gathered::lhs, StoreTile<T>>...,
                                                    kGatheredContraction<T, Gathered::rhs, StoreTransposed<T>>...};

template <class In, class Out, class Loop, Gathered kGathered = Gathered::none>
constexpr auto kFloat8 = variant<Loop, StoreTile<Out>>(
    {.in = kElement<In>, .out = kElement<Out>, .block_n = kFloat8Columns, .gathered = kGathered});

template <class T, Activation kActivation>
constexpr auto kGatedFloat8 = variant<GatedFloat8Mainloop, StoreGatedFloat8<kActivation>>({.in = kElement<T>,
                                                                                           .out = kElement<T>,
                                                                                           .block_n = kScaleBlock,
                                                                                           .formula = Formula::gated,
                                                                                           .activation = kActivation});

template <class... T>
constexpr std::array kTable<Family::float8, T...>{kFloat8<T, float, Float8Mainloop>...,
                                                  kFloat8<T, Bf16, Float8Mainloop>...,
                                                  kFloat8<T, float, GatheredFloat8Mainloop, Gathered::lhs>...,
                                                  kFloat8<T, Bf16, GatheredFloat8Mainloop, Gathered::lhs>...,
                                                  kGatedFloat8<T, Activation::silu>...,
                                                  kGatedFloat8<T, Activation::gelu>...,
                                                  kGatedFloat8<T, Activation::relu>...};

template <Family kFamily>
FamilyKernels Kernels<kFamily>::all() {
  if constexpr (kFamily == Family::float8)
    return {kTable<kFamily, Float8E4M3>, &product_timeline};
  else
    return {kTable<kFamily, Bf16, F16>, &product_timeline};
}

}  // namespace jax_ep::gemm
