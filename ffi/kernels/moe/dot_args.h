// What dispatch_ragged_dot is called with: a dispatch, and the right operand of the product of the rows that arrive.
#pragma once

#include "gemm/problem.h"
#include "kernels/moe/args.h"

namespace jax_ep {

// Tokens travel as they are, and a segment has no padding. N: columns of the product.
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
  static void settings(Visit visit) {
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

}  // namespace jax_ep
