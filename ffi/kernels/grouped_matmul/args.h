// The op of every grouped product of ffi/gemm, and which of them exist. It needs no group of ranks, and runs only on
// Hopper.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "gemm/grouped_matmul.h"
#include "kernels/op_spec.h"

namespace jax_ep {

template <>
struct NamesOf<gemm::Element> {
  static constexpr Named<gemm::Element> all[] = {{"bfloat16", gemm::Element::bfloat16},
                                                 {"float16", gemm::Element::float16},
                                                 {"float32", gemm::Element::float32},
                                                 {"float8_e4m3fn", gemm::Element::float8}};
};
template <>
struct NamesOf<gemm::Grouping> {
  static constexpr Named<gemm::Grouping> all[] = {{"m_grouped", gemm::Grouping::m_grouped},
                                                  {"k_grouped", gemm::Grouping::k_grouped}};
};
template <>
struct NamesOf<gemm::Formula> {
  static constexpr Named<gemm::Formula> all[] = {
      {"store", gemm::Formula::store}, {"gated", gemm::Formula::gated}, {"summed", gemm::Formula::summed}};
};
template <>
struct NamesOf<gemm::Gathered> {
  static constexpr Named<gemm::Gathered> all[] = {
      {"none", gemm::Gathered::none}, {"lhs", gemm::Gathered::lhs}, {"rhs", gemm::Gathered::rhs}};
};
template <>
struct NamesOf<gemm::Activation> {
  static constexpr Named<gemm::Activation> all[] = {{"none", gemm::Activation::none},
                                                    {"silu", gemm::Activation::silu},
                                                    {"gelu", gemm::Activation::gelu},
                                                    {"relu", gemm::Activation::relu},
                                                    {"clamped_swiglu", gemm::Activation::clamped_swiglu}};
};

template <>
struct OpSpec<gemm::GroupedMatmul> : LocalDefaults {
  using Args = gemm::GroupedMatmul;
  using Element = gemm::Element;
  using Formula = gemm::Formula;
  static constexpr const char* kFfiTarget = "grouped_matmul";

  template <class Visit>
  static void settings(Visit visit) {
    visit("dtype", nullptr, &Args::dtype);
    visit("operand_dtype", nullptr, &Args::operand_dtype);
    visit("grouping", nullptr, &Args::grouping);
    visit("formula", nullptr, &Args::formula);
    visit("activation", nullptr, &Args::activation);
    visit("limit", nullptr, &Args::limit);
    visit("slope", nullptr, &Args::slope);
    visit("keeps_products", nullptr, &Args::keeps_products);
    visit("is_biased", nullptr, &Args::is_biased);
    visit("gathered", nullptr, &Args::gathered);
    visit("source_rows", nullptr, &Args::source_rows);
    visit("rhs_is_k_by_n", nullptr, &Args::rhs_is_k_by_n);
    visit("m", nullptr, &Args::m);
    visit("n", nullptr, &Args::n);
    visit("k", nullptr, &Args::k);
    visit("groups", nullptr, &Args::groups);
    visit("columns", nullptr, &Args::columns);
  }

  static std::optional<std::string> validate(const Args& x, int) {
    const std::pair<const char*, int> sizes[] = {{"m", x.m}, {"n", x.n}, {"k", x.k}, {"groups", x.groups}};
    for (const auto& [name, size] : sizes)
      if (size < 1) return wrong(name, "at least 1", size);
    if (x.operand_dtype == Element::float32)
      return wrong("operand_dtype", "bfloat16, float16 or float8_e4m3fn", name_in(x.operand_dtype));
    const bool is_gated = x.formula == Formula::gated;
    if (x.columns != x.n && (!is_gated || x.columns != int64_t{2} * x.n))
      return wrong("columns", "n, or 2 n if what belongs to gate and to up is in one array", x.columns);
    if (is_gated == (x.activation == gemm::Activation::none))
      return wrong("activation", "silu, gelu, relu or clamped_swiglu of a gated unit, and none of any other product",
                   name_in(x.activation));
    if (x.keeps_products && (!is_gated || is_float8(x)))
      return wrong("keeps_products", "False but of a gated product of 16-bit operands", "True");
    if (x.is_biased &&
        (by_contraction(x) || is_float8(x) || x.formula == Formula::summed || x.dtype != x.operand_dtype))
      return wrong("is_biased", "False but of groups of rows of 16 bits, stored in their dtype or gated", "True");
    if (auto error = validate_gathered(x)) return error;
    return is_float8(x) ? validate_float8(x) : validate_16_bits(x);
  }

  template <class Visit>
  JAX_EP_CONSTANT_FN static void buffers(const Args& x, int, Visit visit) {
    const Values in = values_of(x.operand_dtype), out = values_of(x.dtype);
    const bool quantized = is_float8(x), summed = x.formula == Formula::summed, gated = x.formula == Formula::gated;
    const int blocks = x.k / kScaleBlock, column_blocks = x.columns / kScaleBlock;
    visit(lhs("lhs", x), &Args::lhs);
    const int scaled_rows = x.gathered == gemm::Gathered::lhs ? x.source_rows : x.m;
    visit(operand("lhs_scales", Values::float32, scaled_rows, blocks).when(quantized), &Args::lhs_scales);
    visit(rhs("rhs", x), &Args::rhs);
    visit(operand("rhs_scales", Values::float32, x.groups, column_blocks, blocks).when(quantized), &Args::rhs_scales);
    visit(lhs("second_lhs", x).when(summed), &Args::second_lhs);
    visit(rhs("second_rhs", x).when(summed || gated), &Args::second_rhs);
    visit(operand("second_rhs_scales", Values::float32, x.groups, column_blocks, blocks).when(quantized && gated),
          &Args::second_rhs_scales);
    visit(operand("bias", in, x.groups, x.columns).when(x.is_biased), &Args::bias);
    visit(operand("second_bias", in, x.groups, x.columns).when(x.is_biased && gated), &Args::second_bias);
    visit(operand("group_sizes", Values::int32, x.groups), &Args::group_sizes);
    visit(operand("indices", Values::int32, by_contraction(x) ? x.k : x.m).when(x.gathered != gemm::Gathered::none),
          &Args::indices);
    visit(by_contraction(x) ? result("result", out, x.groups, x.m, x.n) : result("result", out, x.m, x.n),
          &Args::result);
    visit(result("result_scales", Values::float32, x.m, x.n / kScaleBlock).when(quantized && gated),
          &Args::result_scales);
    visit(result("first_product", in, x.m, x.columns).when(x.keeps_products), &Args::first_product);
    visit(result("second_product", in, x.m, x.columns).when(x.keeps_products && x.columns == x.n),
          &Args::second_product);
    visit(scratch("counter", Values::int32, 1).when(!quantized && !by_contraction(x)), &Args::counter);
  }

 private:
  JAX_EP_CONSTANT_FN static bool is_float8(const Args& x) { return x.operand_dtype == Element::float8; }
  JAX_EP_CONSTANT_FN static bool by_contraction(const Args& x) { return x.grouping == gemm::Grouping::k_grouped; }

  static std::optional<std::string> validate_gathered(const Args& x) {
    const auto wrong_side = [&](const char* must) { return wrong("gathered", must, name_in(x.gathered)); };
    if (x.gathered == gemm::Gathered::none)
      return x.source_rows == 0 ? std::nullopt
                                : std::optional(wrong("source_rows", "0 if none is gathered", x.source_rows));
    if (x.formula == Formula::summed || (is_float8(x) && x.formula == Formula::gated))
      return wrong_side("none of a sum of products or of a gated unit of float8");
    if (x.gathered == gemm::Gathered::rhs && !by_contraction(x)) return wrong_side("none or lhs of groups of rows");
    if (x.source_rows < 1) return wrong("source_rows", "at least 1", x.source_rows);
    if (x.gathered == gemm::Gathered::rhs)  // the kernel counts result rows of all groups
      if (auto error = at_most("groups", x.groups, x.m)) return error;
    const int columns = !by_contraction(x) ? x.k : x.gathered == gemm::Gathered::lhs ? x.m : x.n;
    return at_most("source_rows", x.source_rows, columns / gemm::kTmaMultiple);
  }

  static std::optional<std::string> validate_16_bits(const Args& x) {
    const bool grouped_k = by_contraction(x), stores = x.formula == Formula::store;
    if (auto error = multiples(gemm::kTmaMultiple, "n", x.n, grouped_k ? "m" : "k", grouped_k ? x.m : x.k))
      return error;
    if (grouped_k && !stores) return wrong("formula", "store of groups of the contraction", name_in(x.formula));
    const bool may_widen = stores && !grouped_k, widens = may_widen && x.dtype == Element::float32;
    if (x.dtype != x.operand_dtype && !widens)
      return wrong("dtype", concat("that of the operands, ", name_in(x.operand_dtype), may_widen ? ", or float32" : ""),
                   name_in(x.dtype));
    const bool wants_n_by_k = x.formula == Formula::summed;
    const bool wants_k_by_n = grouped_k || widens || x.formula == Formula::gated;
    if (x.rhs_is_k_by_n ? !wants_n_by_k : !wants_k_by_n) return std::nullopt;
    return wrong("rhs_is_k_by_n",
                 "True of a gated product, a float32 result or groups of the contraction, and False of a sum of "
                 "products",
                 x.rhs_is_k_by_n ? "True" : "False");
  }

  static std::optional<std::string> validate_float8(const Args& x) {
    const bool is_gated = x.formula == Formula::gated;
    if (auto error = multiples(kScaleBlock, "n", x.n, "k", x.k)) return error;
    if (by_contraction(x)) return wrong("grouping", "m_grouped of operands in float8", name_in(x.grouping));
    if (x.rhs_is_k_by_n) return wrong("rhs_is_k_by_n", "False of operands in float8", "True");
    if (!is_gated && x.formula != Formula::store)
      return wrong("formula", "store or gated of operands in float8", name_in(x.formula));
    if (x.activation == gemm::Activation::clamped_swiglu)
      return wrong("activation", "silu, gelu or relu of operands in float8", name_in(x.activation));
    if (is_gated ? x.dtype != Element::float8 : x.dtype != Element::bfloat16 && x.dtype != Element::float32)
      return wrong("dtype", "bfloat16 or float32, or of a gated product float8_e4m3fn", name_in(x.dtype));
    const int64_t blocks = x.k / kScaleBlock;
    if (auto error = at_most("m", x.m, blocks)) return error;
    return at_most("groups", x.groups, x.columns / kScaleBlock * blocks);
  }

  template <class Enum>
  static const char* name_in(Enum value) {
    const char* found = "";
    for (const Named<Enum>& each : NamesOf<Enum>::all)
      if (each.value == value) found = each.name;
    return found;
  }
  // Kernels count blocks of values, and rows, in int32.
  static std::optional<std::string> at_most(const char* name, int64_t size, int64_t blocks) {
    if (size * blocks <= INT32_MAX) return std::nullopt;
    return wrong(name, concat("at most ", INT32_MAX / blocks), size);
  }
  static std::optional<std::string> multiples(int of, const char* first, int size, const char* second, int other) {
    const std::string must = concat("a multiple of ", of);
    if (size % of) return wrong(first, must, size);
    return other % of ? std::optional(wrong(second, must, other)) : std::nullopt;
  }

  JAX_EP_CONSTANT_FN static Values values_of(Element element) {
    return element == Element::float32    ? Values::float32
           : element == Element::bfloat16 ? Values::bfloat16
           : element == Element::float16  ? Values::float16
                                          : Values::float8;
  }
  JAX_EP_CONSTANT_FN static BufferSpec lhs(const char* name, const Args& x) {
    const bool gathers = x.gathered == gemm::Gathered::lhs;
    return by_contraction(x) ? operand(name, values_of(x.operand_dtype), gathers ? x.source_rows : x.k, x.m)
                             : operand(name, values_of(x.operand_dtype), gathers ? x.source_rows : x.m, x.k);
  }
  JAX_EP_CONSTANT_FN static BufferSpec rhs(const char* name, const Args& x) {
    if (by_contraction(x))
      return operand(name, values_of(x.operand_dtype), x.gathered == gemm::Gathered::rhs ? x.source_rows : x.k, x.n);
    return x.rhs_is_k_by_n ? operand(name, values_of(x.operand_dtype), x.groups, x.k, x.columns)
                           : operand(name, values_of(x.operand_dtype), x.groups, x.columns, x.k);
  }
};

}  // namespace jax_ep
