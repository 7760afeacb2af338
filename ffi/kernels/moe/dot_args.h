// What the products with a dispatch or a combine are called with.
#pragma once

#include <type_traits>

#include "gemm/arguments.h"
#include "gemm/beside.h"
#include "gemm/problem.h"
#include "kernels/moe/args.h"

namespace jax_ep {

// The words of a SendingOrder, from the first on: two tickets, two counts, and how many items are in each bin.
struct SortWords {
  int first, bins;

  JAX_EP_CONSTANT_FN int tickets() const { return first; }
  JAX_EP_CONSTANT_FN int counts() const { return first + 2; }
  JAX_EP_CONSTANT_FN int items() const { return first + 4; }
  JAX_EP_CONSTANT_FN int end() const { return items() + bins; }
};

// The words by which a rank tells its product what is here of the rows that it waits for. All are zeros when the kernel
// begins: the host clears them on a GPU, the first coop elsewhere. Whoever reads one with acquire, at the scope of the
// device, sees what it stands for.
struct ArrivalWords {
  int row_blocks;

  JAX_EP_CONSTANT_FN explicit ArrivalWords(int capacity) : row_blocks(gemm::row_blocks(capacity)) {}

  // kYes when `sizes` are written.
  JAX_EP_CONSTANT_FN int laid_out() const { return 0; }
  // The last thing that the op does: kYes, or kNothing if it delivers nothing and its results are filled. Nobody waits
  // for rows any more.
  JAX_EP_CONSTANT_FN int over() const { return 1; }
  // On a CPU: how many tokens of all ranks were taken in.
  JAX_EP_CONSTANT_FN int taken() const { return 2; }
  // How many rows of each block of `received` are here.
  JAX_EP_CONSTANT_FN int arrived() const { return 16; }  // in lines of their own
  // The product's counter of tiles.
  JAX_EP_CONSTANT_FN int tiles() const { return 3; }
  // Those of the order in which tokens are sent: a bin for the row block of their first row at any owner, and one
  // behind them for tokens without rows.
  JAX_EP_CONSTANT_FN SortWords sort() const { return {arrived() + row_blocks, row_blocks + 1}; }
  JAX_EP_CONSTANT_FN int count() const { return sort().end(); }

  static constexpr uint64_t kYes = 1, kNothing = gemm::Beside::kNothing;
};

// Words that count tokens become flags, which are at least a stamp.
constexpr int64_t kMostCounted = int64_t{1} << kTagBits;

// A dispatch, and the right operand of the product of the rows that arrive; or gate and up of a gated unit
// activation(rows gate) * (rows up), a pair of matrices, or one with gate in front. Tokens travel as they are, and a
// segment has no padding. N: columns of a matrix. F: those of the result.
struct DispatchDotArgs : DispatchArgs {
  int columns;
  bool gated, pair;
  bool keeps_products;  // by gate and up
  gemm::Activation activation;
  const char* rhs;  // [L, H, N]
  const char* up;   // [L, H, N] of a pair
  char* product;    // [C, F]
  char* of_gate;    // [C, N], or null
  char* of_up;      // [C, N] of a pair, or null
  uint64_t* words;  // see ArrivalWords
  int32_t* order;   // [R, T] by source and position, the token that is sent there: see TokensInOrder
  int32_t* sizes;   // [L] those of the groups, for a product beside the dispatch: a failure leaves them as they are
};

JAX_EP_CONSTANT_FN OpKind kind_of(const DispatchDotArgs&) { return OpKind::dispatch_ragged_dot; }

JAX_EP_CONSTANT_FN int result_columns(const DispatchDotArgs& args) {
  return args.gated && !args.pair ? args.columns / 2 : args.columns;
}

JAX_EP_CONSTANT_FN gemm::Problem product_of(const DispatchDotArgs& args, int ranks, int band) {
  return {gemm::Grouping::m_grouped, args.capacity, result_columns(args), args.hidden, args.num_experts / ranks,
          args.group_sizes,          band};
}

// It is launched as products are.
template <>
inline constexpr bool kIsProduct<DispatchDotArgs> = true;

template <>
struct OpSpec<DispatchDotArgs> : OpDefaults {
  using Args = DispatchDotArgs;
  static constexpr const char* kTarget = "dispatch_ragged_dot";
  static constexpr KindName kKinds[] = {{OpKind::dispatch_ragged_dot, "dispatch_ragged_dot"}};

  template <class Visit>
  static constexpr void settings(Visit visit) {
    visit("dtype", nullptr, &Args::dtype);
    visit("num_tokens", "T", &Args::num_tokens);
    visit("top_k", "K", &Args::top_k);
    visit("hidden", "H", &Args::hidden);
    visit("num_experts", "E", &Args::num_experts);
    visit("capacity", "capacity", &Args::capacity);
    visit("drop", "drop", &Args::drop);
    visit("columns", "N", &Args::columns);
    visit("gated", "gated", &Args::gated);
    visit("pair", "gate and up", &Args::pair);
    visit("keeps_products", nullptr, &Args::keeps_products);
    visit("activation", nullptr, &Args::activation);
  }
  // Few tokens are not told to all ranks, as a dispatch alone does it: what that gains, the product hides.
  static void complete(Args& args, int, bool) {
    args.alignment = 1;
    args.eager = std::min(args.num_tokens, kEagerTokens);
  }
  static const char* fault(Args args, int ranks) {
    args.alignment = 1;
    if (args.hidden < 1 || args.columns < 1) return "rows and columns of the right operand must not be empty";
    if (!args.gated && (args.pair || args.keeps_products)) return "only a gated unit has gate and up";
    if (args.gated && !args.pair && args.columns % 2) return "gate and up in one matrix must have as many columns";
    if (args.num_tokens >= kMostCounted) return "the tokens of a rank must be fewer than 2**24";
    return OpSpec<DispatchArgs>::fault(args, ranks);
  }

  // Those of the dispatch, in its order, as peers number what they use of them; then those of the product. `order` has
  // the place of `scales`, which tokens do not have that travel as they are.
  template <class Visit>
  JAX_EP_CONSTANT_FN static void buffers(const Args& a, int ranks, Visit visit) {
    const int local = a.num_experts / ranks;
    const BufferSpec order = scratch("order", Values::int32, ranks, a.num_tokens).for_peers();
    OpSpec<DispatchArgs>::buffers(a, ranks, OfDispatch<Visit>{visit, order});
    const Values values = values_of(a.dtype);
    visit(operand("rhs", values, local, a.hidden, a.columns), &Args::rhs);
    visit(operand("up", values, local, a.hidden, a.columns).when(a.pair), &Args::up);
    visit(result("product", values, a.capacity, result_columns(a)), &Args::product);
    visit(result("of_gate", values, a.capacity, a.columns).when(a.keeps_products), &Args::of_gate);
    visit(result("of_up", values, a.capacity, a.columns).when(a.keeps_products && a.pair), &Args::of_up);
    visit(scratch("sizes", Values::int32, local), &Args::sizes);
    visit(scratch("words", Values::uint8, ArrivalWords(a.capacity).count(), sizeof(uint64_t)), &Args::words);
  }

 private:
  // A member of the base, as one of these arguments.
  template <class Visit>
  struct OfDispatch {
    Visit& visit;
    const BufferSpec& order;
    template <class T>
    JAX_EP_CONSTANT_FN void operator()(const BufferSpec& spec, T DispatchArgs::* member) const {
      if constexpr (std::is_same_v<T, float*>)
        if (member == &DispatchArgs::scales) return visit(order, &Args::order);
      visit(spec, static_cast<T Args::*>(member));
    }
  };
};

// A combine of a product's rows, and the operands of the product. F: what it contracts. `outputs` is not looked at.
struct DotCombineArgs : CombineArgs {
  int contraction, local_experts;
  const char* lhs;             // [C, F]
  const char* rhs;             // [L, F, H]
  const int32_t* group_sizes;  // [L]
  char* product;               // [C, H]
  uint64_t* words;             // by which kernels and warps tell each other what is done: see DotCombineWords
  int32_t* order;              // [(R - 1) T]: see order_by_last_rows
};

JAX_EP_CONSTANT_FN OpKind kind_of(const DotCombineArgs&) { return OpKind::ragged_dot_combine; }

// The words of a call, all of which begin as zeros.
struct DotCombineWords {
  int row_blocks;

  JAX_EP_CONSTANT_FN explicit DotCombineWords(int capacity) : row_blocks(gemm::row_blocks(capacity)) {}

  // Behind those of the product's row blocks (CountedRows): a bin for the row block of a token's last row, and one
  // before them for tokens without rows. Then the product's counter of tiles.
  JAX_EP_CONSTANT_FN SortWords sort() const { return {row_blocks, row_blocks + 1}; }
  JAX_EP_CONSTANT_FN int tiles() const { return sort().end(); }
  JAX_EP_CONSTANT_FN int count() const { return tiles() + 1; }
};

JAX_EP_CONSTANT_FN gemm::Problem product_of(const DotCombineArgs& args, int, int band) {
  return {gemm::Grouping::m_grouped, args.capacity,    args.hidden, args.contraction,
          args.local_experts,        args.group_sizes, band};
}

// It is launched as products are.
template <>
inline constexpr bool kIsProduct<DotCombineArgs> = true;

template <>
struct OpSpec<DotCombineArgs> : OpDefaults {
  using Args = DotCombineArgs;
  static constexpr const char* kTarget = "ragged_dot_combine";
  static constexpr KindName kKinds[] = {{OpKind::ragged_dot_combine, "ragged_dot_combine"}};

  template <class Visit>
  static constexpr void settings(Visit visit) {
    visit("dtype", nullptr, of_combine(&Args::dtype));
    visit("num_tokens", "T", of_combine(&Args::num_tokens));
    visit("top_k", "K", of_combine(&Args::top_k));
    visit("hidden", "H", of_combine(&Args::hidden));
    visit("capacity", "capacity", of_combine(&Args::capacity));
    visit("contraction", "F", &Args::contraction);
    visit("local_experts", "E / R", &Args::local_experts);
  }
  static void complete(Args& args, int, bool) { args.weighted = true; }
  static const char* fault(const Args& args, int ranks) {
    if (args.hidden < 1 || args.contraction < 1) return "rows and columns of the right operand must not be empty";
    if (int64_t{ranks} * args.num_tokens >= kMostCounted) return "the tokens of all ranks must be fewer than 2**24";
    if (int64_t{args.hidden} >= kMostCounted / gemm::kBlockM) return "rows must have fewer than 2**17 values";
    return fault_of_counts(args, ranks);
  }

  // What peers use is numbered as combine's.
  template <class Visit>
  JAX_EP_CONSTANT_FN static void buffers(const Args& a, int ranks, Visit visit) {
    const Values values = values_of(a.dtype);
    const int tokens = a.num_tokens;
    visit(operand("lhs", values, a.capacity, a.contraction), &Args::lhs);
    visit(operand("rhs", values, a.local_experts, a.contraction, a.hidden), &Args::rhs);
    visit(operand("group_sizes", Values::int32, a.local_experts), &Args::group_sizes);
    visit(operand("weights", Values::float32, ranks, tokens, a.top_k), of_combine(&Args::weights));
    visit(operand("targets", Values::int32, tokens, a.top_k), of_combine(&Args::targets));
    visit(operand("rows", Values::int32, ranks, tokens, a.top_k), of_combine(&Args::rows));
    visit(scratch("landing", values, ranks, tokens, a.hidden).for_peers(), of_combine(&Args::landing));
    visit(result("combined", values, tokens, a.hidden), of_combine(&Args::combined));
    visit(scratch("product", values, a.capacity, a.hidden), &Args::product);
    visit(scratch("words", Values::uint8, DotCombineWords(a.capacity).count(), sizeof(uint64_t)), &Args::words);
    visit(scratch("order", Values::int32, ranks - 1, tokens), &Args::order);
  }

 private:
  // A member of the base, as one of these arguments.
  template <class T>
  JAX_EP_CONSTANT_FN static T Args::* of_combine(T CombineArgs::* member) {
    return member;
  }
};

}  // namespace jax_ep
