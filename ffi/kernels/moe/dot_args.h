// What the products with a dispatch or a combine are called with.
#pragma once

#include "gemm/problem.h"
#include "kernels/moe/args.h"

namespace jax_ep {

// A dispatch, and the right operand of the product of the rows that arrive. Tokens travel as they are, and a segment
// has no padding. N: columns of the product.
struct DispatchDotArgs : DispatchArgs {
  int columns;
  const char* rhs;  // [L, H, N]
  char* product;    // [C, N]
  uint64_t* ready;  // by row block of `received`: see ReadyRows
};

JAX_EP_CONSTANT_FN OpKind kind_of(const DispatchDotArgs&) { return OpKind::dispatch_ragged_dot; }

JAX_EP_CONSTANT_FN gemm::Problem product_of(const DispatchDotArgs& args, int ranks, int band) {
  return {gemm::Grouping::m_grouped, args.capacity,    args.columns, args.hidden,
          args.num_experts / ranks,  args.group_sizes, band};
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
  }
  // Few tokens are not told to all ranks, as a dispatch alone does it: what that gains, the product hides.
  static void complete(Args& args, int, bool) {
    args.alignment = 1;
    args.eager = std::min(args.num_tokens, kEagerTokens);
  }
  static const char* fault(Args args, int ranks) {
    args.alignment = 1;
    if (args.hidden < 1 || args.columns < 1) return "rows and columns of the right operand must not be empty";
    return OpSpec<DispatchArgs>::fault(args, ranks);
  }

  // Those of the dispatch, in its order, as peers number what they use of them; then those of the product.
  template <class Visit>
  JAX_EP_CONSTANT_FN static void buffers(const Args& a, int ranks, Visit visit) {
    const int local = a.num_experts / ranks;
    OpSpec<DispatchArgs>::buffers(a, ranks, OfDispatch<Visit>{visit});
    visit(operand("rhs", values_of(a.dtype), local, a.hidden, a.columns), &Args::rhs);
    visit(result("product", values_of(a.dtype), a.capacity, a.columns), &Args::product);
    const int blocks = (a.capacity + gemm::kBlockM - 1) / gemm::kBlockM;
    visit(scratch("ready", Values::uint8, blocks, sizeof(uint64_t)), &Args::ready);
  }

 private:
  // A member of the base, as one of these arguments.
  template <class Visit>
  struct OfDispatch {
    Visit& visit;
    template <class T>
    JAX_EP_CONSTANT_FN void operator()(const BufferSpec& spec, T DispatchArgs::* member) const {
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
  uint64_t* words;             // by which its warps tell each other what is done: see DotCombineWords
  int32_t* order;              // [(R - 1) T]: see SendingOrder
};

JAX_EP_CONSTANT_FN OpKind kind_of(const DotCombineArgs&) { return OpKind::ragged_dot_combine; }

// The words of a call, all of which begin as zeros.
struct DotCombineWords {
  int row_blocks;

  JAX_EP_CONSTANT_FN explicit DotCombineWords(int capacity)
      : row_blocks((capacity + gemm::kBlockM - 1) / gemm::kBlockM) {}

  // Where those of the row blocks are (ReadyRows), then those of SendingOrder: two tickets, two counts, and how many
  // tokens have their last row in each row block, those without rows first.
  JAX_EP_CONSTANT_FN int tickets() const { return row_blocks; }
  JAX_EP_CONSTANT_FN int counts() const { return row_blocks + 2; }
  JAX_EP_CONSTANT_FN int tokens() const { return row_blocks + 4; }
  JAX_EP_CONSTANT_FN int bins() const { return row_blocks + 1; }
  JAX_EP_CONSTANT_FN int count() const { return tokens() + bins(); }
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
    // Words that count them become flags, which are at least a stamp.
    constexpr int64_t kMost = int64_t{1} << kTagBits;
    if (int64_t{ranks} * args.num_tokens >= kMost) return "the tokens of all ranks must be fewer than 2**24";
    if (int64_t{args.hidden} + 256 >= kMost / gemm::kBlockM) return "rows must have fewer than 2**17 - 256 values";
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
