// The arguments of collective matmuls, and how their rows are cut into row blocks.
#pragma once

#include <cstdint>

#include "comm/dtype.h"
#include "comm/integers.h"
#include "comm/platform.h"
#include "comm/signal_pad.h"
#include "kernels/op_spec.h"

namespace jax_ep {

// This rank's factors of a sum of products over the ranks.
struct MatmulReduceArgs {
  DType dtype, operand_dtype;  // of the result, of lhs and rhs
  int m, n, k;
  bool transpose_rhs;   // rhs is [N, K]
  bool reduce_scatter;  // a rank keeps only its part of the rows
  const char* lhs;      // [M, K]
  const char* rhs;      // [K, N]
  char* result;         // [M, N], or [M / R, N]
  char* partial;        // [M, N]: the product of this rank
};

// MatmulReduceArgs for the kernel in which two ranks exchange their tiles.
struct MatmulExchangeArgs : MatmulReduceArgs {};

// The rows of all ranks, in the order of the ranks, times this rank's matrix.
struct AllGatherMatmulArgs {
  DType dtype, operand_dtype;
  int m, n, k;  // m: rows of one rank
  bool transpose_rhs;
  const char* lhs;  // [M, K]
  const char* rhs;  // [K, N]
  char* result;     // [R M, N]
  char* gathered;   // [R M, K]
};

JAX_EP_CONSTANT_FN OpKind kind_of(const MatmulReduceArgs& args) {
  return args.reduce_scatter ? OpKind::matmul_reduce_scatter : OpKind::matmul_all_reduce;
}

template <class Args>
struct CollectiveMatmulSpec : CollectiveMatmulDefaults {
  template <class Visit>
  static constexpr void settings(Visit visit) {
    visit("dtype", nullptr, &Args::dtype);
    visit("operand_dtype", nullptr, &Args::operand_dtype);
    visit("m", "M", &Args::m);
    visit("n", "N", &Args::n);
    visit("k", "K", &Args::k);
    visit("transpose_rhs", "transposed rhs", &Args::transpose_rhs);
  }
  static std::optional<std::string> validate(const Args& args, int ranks) {
    if (args.m < 1) return wrong("m", "at least 1", args.m);
    if (args.n < 1) return wrong("n", "at least 1", args.n);
    if (args.k < 1) return wrong("k", "at least 1", args.k);
    if (args.dtype != args.operand_dtype && args.dtype != DType::float32)
      return wrong("dtype", concat("that of the operands, ", name_of(values_of(args.operand_dtype)), ", or float32"),
                   name_of(values_of(args.dtype)));
    if (is_countable(int64_t{ranks} * args.m)) return std::nullopt;
    return wrong("m", concat("below (", kCountable, ") / ", ranks, " ranks"), args.m);
  }

 protected:
  template <class Visit>
  JAX_EP_CONSTANT_FN static void factors(const Args& a, Visit visit) {
    const Values values = values_of(a.operand_dtype);
    visit(operand("lhs", values, a.m, a.k), &Args::lhs);
    visit(operand("rhs", values, a.transpose_rhs ? a.n : a.k, a.transpose_rhs ? a.k : a.n), &Args::rhs);
  }
};

template <>
struct OpSpec<MatmulReduceArgs> : CollectiveMatmulSpec<MatmulReduceArgs> {
  using Args = MatmulReduceArgs;
  static constexpr const char* kFfiTarget = "matmul_reduce";
  static constexpr KindName kKinds[] = {{OpKind::matmul_all_reduce, "matmul_all_reduce"},
                                        {OpKind::matmul_reduce_scatter, "matmul_reduce_scatter"}};

  template <class Visit>
  static constexpr void settings(Visit visit) {
    CollectiveMatmulSpec::settings(visit);
    visit("reduce_scatter", nullptr, &Args::reduce_scatter);
  }
  static std::optional<std::string> validate(const Args& args, int ranks) {
    if (args.reduce_scatter && args.m % ranks) return wrong("m", concat("a multiple of ", ranks, " ranks"), args.m);
    return CollectiveMatmulSpec::validate(args, 1);
  }

  template <class Visit>
  JAX_EP_CONSTANT_FN static void buffers(const Args& a, int ranks, Visit visit) {
    factors(a, visit);
    visit(scratch("partial", values_of(a.dtype), a.m, a.n).for_peers(), &Args::partial);
    const bool all = !a.reduce_scatter;
    visit(result("result", values_of(a.dtype), all ? a.m : a.m / ranks, a.n).for_peers(all).replicated(all),
          &Args::result);
  }
};

template <>
struct OpSpec<AllGatherMatmulArgs> : CollectiveMatmulSpec<AllGatherMatmulArgs> {
  using Args = AllGatherMatmulArgs;
  static constexpr const char* kFfiTarget = "all_gather_matmul";
  static constexpr KindName kKinds[] = {{OpKind::all_gather_matmul, "all_gather_matmul"}};

  template <class Visit>
  JAX_EP_CONSTANT_FN static void buffers(const Args& a, int ranks, Visit visit) {
    factors(a, visit);
    visit(result("result", values_of(a.dtype), int64_t{ranks} * a.m, a.n), &Args::result);
    visit(result("gathered", values_of(a.operand_dtype), int64_t{ranks} * a.m, a.k).for_peers(), &Args::gathered);
  }
};

constexpr int kBlockRows = Coop::lanes == 1 ? 16 : 128;  // on a GPU the rows of a tile of the product

struct RowBlocks {
  int rows, block_rows, chunks;

  // One flag is left for the end of a reduction.
  JAX_EP_FN explicit RowBlocks(int rows)
      : rows(rows),
        block_rows(align_up(ceil_div(rows, kMaxFlags - 1), kBlockRows)),
        chunks(ceil_div(rows, block_rows)) {}

  JAX_EP_FN int chunk_of(int row) const { return row / block_rows; }
  JAX_EP_FN Range chunk(int row_block) const {
    return {row_block * block_rows, smaller((row_block + 1) * block_rows, rows)};
  }
};

JAX_EP_FN Range overlap(Range a, Range b) { return {larger(a.begin, b.begin), smaller(a.end, b.end)}; }

}  // namespace jax_ep
