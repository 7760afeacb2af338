// What the grouped products are called with, and their specs. They need no group of ranks: everything is on the device
// of the call, which is a Hopper.
#pragma once

#include <cstdint>

#include "gemm/arguments.h"
#include "kernels/op_spec.h"

namespace jax_ep {

// What the specs have in common.
struct GroupedSpec : LocalDefaults {
  static constexpr int kMultiple = 8;  // TMA wants lines of 16 bytes

 protected:
  template <class Args, class Visit>
  static void sizes(Visit visit) {
    visit("m", nullptr, &Args::m);
    visit("n", nullptr, &Args::n);
    visit("k", nullptr, &Args::k);
    visit("groups", nullptr, &Args::groups);
  }
  template <class Args>
  static const char* validate_operands(const Args& x) {
    if (x.dtype == DType::float32) return "dtype must be bfloat16 or float16";
    if (x.n % kMultiple || x.k % kMultiple) return "n and k must be multiples of 8";
    return nullptr;
  }
  template <class Args>
  static const char* validate_sizes(const Args& x) {
    return x.m < 1 || x.n < 1 || x.k < 1 || x.groups < 1 ? "m, n, k and groups must be at least 1" : nullptr;
  }
};

template <>
struct NamesOf<gemm::Activation> {
  static constexpr Named<gemm::Activation> all[] = {
      {"silu", gemm::Activation::silu}, {"gelu", gemm::Activation::gelu}, {"relu", gemm::Activation::relu}};
};

// A group's rows times its matrix: lhs [m, k], rhs [groups, k, n] or [groups, n, k] -> [m, n].
struct GroupedDotArgs : gemm::Arguments {};

template <>
struct OpSpec<GroupedDotArgs> : GroupedSpec {
  using Args = GroupedDotArgs;
  static constexpr const char* kTarget = "grouped_matmul";

  template <class Visit>
  static void settings(Visit visit) {
    visit("dtype", nullptr, &Args::out);
    visit("operand_dtype", nullptr, &Args::in);
    sizes<Args>(visit);
    visit("rhs_is_k_by_n", nullptr, &Args::b_is_k_by_n);
  }
  static void complete(Args& x, int, bool) { x.grouping = gemm::Grouping::m_grouped; }
  static const char* validate(const Args& x, int) {
    if (x.in == DType::float32) return "operand_dtype must be bfloat16 or float16";
    if (x.out != x.in && (x.out != DType::float32 || !x.b_is_k_by_n))
      return "the result must be of the operands' dtype, or float32 of an rhs stored [groups, k, n]";
    if (x.n % kMultiple || x.k % kMultiple) return "n and k must be multiples of 8";
    return validate_sizes(x);
  }

  template <class Visit>
  JAX_EP_CONSTANT_FN static void buffers(const Args& x, int, Visit visit) {
    const Values values = values_of(x.in);
    visit(operand("lhs", values, x.m, x.k), &Args::a);
    visit(operand("rhs", values, x.groups, x.b_is_k_by_n ? x.k : x.n, x.b_is_k_by_n ? x.n : x.k), &Args::b);
    visit(operand("group_sizes", Values::int32, x.groups), &Args::group_sizes);
    visit(result("product", values_of(x.out), x.m, x.n), &Args::out_data);
    visit(scratch("counter", Values::int32, 1), &Args::counter);
  }
};

// Over the rows of each group, lhs [k, m] transposed times rhs [k, n] -> [groups, m, n].
struct GroupedOuterArgs : gemm::Arguments {};

template <>
struct OpSpec<GroupedOuterArgs> : GroupedSpec {
  using Args = GroupedOuterArgs;
  static constexpr const char* kTarget = "grouped_outer";

  template <class Visit>
  static void settings(Visit visit) {
    visit("dtype", nullptr, &Args::out);
    sizes<Args>(visit);
  }
  static void complete(Args& x, int, bool) {
    x.grouping = gemm::Grouping::k_grouped;
    x.in = x.out;
    x.a_is_k_by_m = x.b_is_k_by_n = true;
  }
  static const char* validate(const Args& x, int) {
    if (x.out == DType::float32) return "dtype must be bfloat16 or float16";
    if (x.m % kMultiple || x.n % kMultiple) return "m and n must be multiples of 8";
    return validate_sizes(x);
  }

  template <class Visit>
  JAX_EP_CONSTANT_FN static void buffers(const Args& x, int, Visit visit) {
    const Values values = values_of(x.out);
    visit(operand("lhs", values, x.k, x.m), &Args::a);
    visit(operand("rhs", values, x.k, x.n), &Args::b);
    visit(operand("group_sizes", Values::int32, x.groups), &Args::group_sizes);
    visit(result("product", values, x.groups, x.m, x.n), &Args::out_data);
  }
};

// rows [m, k], gate and up [groups, k, n], or twice both in one array [groups, k, 2 n], gate in front
// -> activation(rows gate) * (rows up) [m, n], and if `keeps_products` both products [m, n], or one array [m, 2 n].
struct GatedDotArgs : gemm::GatedArguments {};

template <>
struct OpSpec<GatedDotArgs> : GroupedSpec {
  using Args = GatedDotArgs;
  static constexpr const char* kTarget = "gated_matmul";

  template <class Visit>
  static void settings(Visit visit) {
    visit("dtype", nullptr, &Args::dtype);
    visit("activation", nullptr, &Args::activation);
    visit("keeps_products", nullptr, &Args::keeps_products);
    sizes<Args>(visit);
    visit("columns", nullptr, &Args::columns);
  }
  static void complete(Args& x, int, bool) { x.up_column = x.columns - x.n; }
  static const char* validate(const Args& x, int) {
    if (const char* const error = validate_operands(x)) return error;
    if (x.columns != x.n && x.columns != int64_t{2} * x.n) return "columns must be n or 2 n";
    return validate_sizes(x);
  }

  template <class Visit>
  JAX_EP_CONSTANT_FN static void buffers(const Args& x, int, Visit visit) {
    const Values values = values_of(x.dtype);
    visit(operand("rows", values, x.m, x.k), &Args::rows);
    visit(operand("gate", values, x.groups, x.k, x.columns), &Args::gate);
    visit(operand("up", values, x.groups, x.k, x.columns), &Args::up);
    visit(operand("group_sizes", Values::int32, x.groups), &Args::group_sizes);
    visit(result("product", values, x.m, x.n), &Args::out_data);
    visit(result("of_gate", values, x.m, x.columns).when(x.keeps_products), &Args::of_gate);
    visit(result("of_up", values, x.m, x.columns).when(x.keeps_products && x.columns == x.n), &Args::of_up);
    visit(scratch("counter", Values::int32, 1), &Args::counter);
  }
};

// first_lhs [m, k] times first_rhs [groups, n, k] transposed, and the second of both alike -> their sum [m, n], rounded
// once.
struct SummedDotArgs : gemm::SummedArguments {};

template <>
struct OpSpec<SummedDotArgs> : GroupedSpec {
  using Args = SummedDotArgs;
  static constexpr const char* kTarget = "summed_matmul";

  template <class Visit>
  static void settings(Visit visit) {
    visit("dtype", nullptr, &Args::dtype);
    sizes<Args>(visit);
  }
  static const char* validate(const Args& x, int) {
    if (const char* const error = validate_operands(x)) return error;
    return validate_sizes(x);
  }

  template <class Visit>
  JAX_EP_CONSTANT_FN static void buffers(const Args& x, int, Visit visit) {
    const Values values = values_of(x.dtype);
    visit(operand("first_lhs", values, x.m, x.k), &Args::first_rows);
    visit(operand("first_rhs", values, x.groups, x.n, x.k), &Args::first);
    visit(operand("second_lhs", values, x.m, x.k), &Args::second_rows);
    visit(operand("second_rhs", values, x.groups, x.n, x.k), &Args::second);
    visit(operand("group_sizes", Values::int32, x.groups), &Args::group_sizes);
    visit(result("product", values, x.m, x.n), &Args::out_data);
    visit(scratch("counter", Values::int32, 1), &Args::counter);
  }
};

// lhs [m, k] and rhs [groups, n, k] in float8, with a scale per row and block, and per block of both -> [m, n].
struct Float8DotArgs : gemm::Float8Arguments {};

template <>
struct OpSpec<Float8DotArgs> : GroupedSpec {
  using Args = Float8DotArgs;
  static constexpr const char* kTarget = "grouped_matmul_float8";

  template <class Visit>
  static void settings(Visit visit) {
    visit("dtype", nullptr, &Args::out);
    sizes<Args>(visit);
  }
  static const char* validate(const Args& x, int) {
    if (x.out == DType::float16) return "dtype must be bfloat16 or float32";
    if (x.n % gemm::kFloat8Block || x.k % gemm::kFloat8Block) return "n and k must be multiples of 128";
    if (!fits_int32(int64_t{x.m} * (x.k / gemm::kFloat8Block))) return "there are too many rows";
    return validate_sizes(x);
  }

  template <class Visit>
  JAX_EP_CONSTANT_FN static void buffers(const Args& x, int, Visit visit) {
    const int blocks = x.k / gemm::kFloat8Block;
    visit(operand("lhs", Values::float8, x.m, x.k), &Args::a);
    visit(operand("the scales of lhs", Values::float32, x.m, blocks), &Args::a_scales);
    visit(operand("rhs", Values::float8, x.groups, x.n, x.k), &Args::b);
    visit(operand("the scales of rhs", Values::float32, x.groups, x.n / gemm::kFloat8Block, blocks), &Args::b_scales);
    visit(operand("group_sizes", Values::int32, x.groups), &Args::group_sizes);
    visit(result("product", values_of(x.out), x.m, x.n), &Args::out_data);
  }
};

// rows [m, k], gate and up [groups, n, k], or twice both in one array [groups, 2 n, k], gate in front, in float8 with
// their scales -> activation(rows gate) * (rows up) [m, n] in float8.
struct GatedFloat8DotArgs : gemm::GatedFloat8Arguments {};

template <>
struct OpSpec<GatedFloat8DotArgs> : GroupedSpec {
  using Args = GatedFloat8DotArgs;
  static constexpr const char* kTarget = "gated_matmul_float8";

  template <class Visit>
  static void settings(Visit visit) {
    visit("activation", nullptr, &Args::activation);
    sizes<Args>(visit);
    visit("columns", nullptr, &Args::columns);
  }
  static void complete(Args& x, int, bool) { x.up_column = x.columns - x.n; }
  static const char* validate(const Args& x, int) {
    if (x.n % gemm::kFloat8Block || x.k % gemm::kFloat8Block) return "n and k must be multiples of 128";
    if (x.columns != x.n && x.columns != int64_t{2} * x.n) return "columns must be n or 2 n";
    const int64_t blocks = x.k / gemm::kFloat8Block;
    if (!fits_int32(x.m * blocks)) return "there are too many rows";
    if (!fits_int32(int64_t{x.groups} * (x.columns / gemm::kFloat8Block) * blocks)) return "there are too many weights";
    return validate_sizes(x);
  }

  template <class Visit>
  JAX_EP_CONSTANT_FN static void buffers(const Args& x, int, Visit visit) {
    const int blocks = x.k / gemm::kFloat8Block, columns = x.columns / gemm::kFloat8Block;
    visit(operand("rows", Values::float8, x.m, x.k), &Args::rows);
    visit(operand("the scales of rows", Values::float32, x.m, blocks), &Args::rows_scales);
    visit(operand("gate", Values::float8, x.groups, x.columns, x.k), &Args::gate);
    visit(operand("the scales of gate", Values::float32, x.groups, columns, blocks), &Args::gate_scales);
    visit(operand("up", Values::float8, x.groups, x.columns, x.k), &Args::up);
    visit(operand("the scales of up", Values::float32, x.groups, columns, blocks), &Args::up_scales);
    visit(operand("group_sizes", Values::int32, x.groups), &Args::group_sizes);
    visit(result("product", Values::float8, x.m, x.n), &Args::out_data);
    visit(result("scales", Values::float32, x.m, x.n / gemm::kFloat8Block), &Args::out_scales);
  }
};

}  // namespace jax_ep
