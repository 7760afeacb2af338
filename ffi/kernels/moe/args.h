// The arguments of dispatch, scatter and combine: pointers into XLA's buffers of this rank, and the shapes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>

#include "comm/dtype.h"
#include "comm/signal_pad.h"
#include "kernels/moe/layout.h"
#include "kernels/op_spec.h"
#include "rows/float8_message.h"

namespace jax_ep {

// How tokens travel. plain: in their dtype. float8: in float8, decoded on arrival. float8_rows: in float8, not decoded.
enum class Wire : uint8_t { plain, float8, float8_rows };
template <>
struct NamesOf<Wire> {
  static constexpr Named<Wire> all[] = {
      {"plain", Wire::plain}, {"float8", Wire::float8}, {"float8_rows", Wire::float8_rows}};
};

// Whether each rank sends its ids and weights to all ranks and computes the whole routing (RoutingByAssignments): if it
// has few tokens, and a mailbox has room for their assignments.
constexpr bool routes_by_assignments(int num_tokens, int top_k) {
  return num_tokens <= kFewTokens && num_tokens * top_k <= kMaxAssignments;
}

// The number of eager tokens, which travel to landing slots before their rows are known, like eager messages in MPI.
// All tokens are eager if they are routed by assignments, or decoded on arrival, which needs landing slots anyway.
// Otherwise as many are eager as travel while the routing is computed. Routing many tokens takes longer, so more of
// them are eager if rows are short.
constexpr int eager_tokens(int num_tokens, int top_k, int64_t row_bytes, Wire wire) {
  if (routes_by_assignments(num_tokens, top_k) || wire == Wire::float8) return num_tokens;
  const int eighth = num_tokens / 8 / kEagerStep * kEagerStep;
  const int most = row_bytes > kShortRowBytes ? kEagerTokens : std::clamp(eighth, kEagerTokens, kMostEagerTokens);
  return std::min(num_tokens, most);
}

// Shapes as in jax_ep.dispatch: T tokens, top-K, H hidden, E experts, C capacity, R ranks, L = E / R. M is C if the op
// expands, and R T if not.
struct DispatchArgs {
  DType dtype;
  int num_tokens, top_k, hidden, num_experts, capacity, alignment;
  Wire wire;
  bool drop;
  bool expand = true;          // copies each token to all its rows; else it stays in slot `source * T + token`
  bool zero_unused = true;     // zeroes rows after the last expert's
  const char* tokens;          // [T, H]
  const int32_t* expert_ids;   // [T, K]
  const float* token_weights;  // [T, K]
  char* rows;                  // [M, H]
  float* scales;               // [M, H / 128], of rows in float8
  int32_t* indices;            // [C] without expansion: the slot of each row, or -1
  int32_t* group_sizes;        // [L]
  int32_t* targets;            // [T, K]
  int32_t* row_of;             // [R, T, K] the row here of a source's assignment, or -1
  float* weights;              // [R, T, K] of the assignments in row_of, else 0
  int32_t* counts;             // [R, L]
  int32_t* dropped;            // [1]
  int32_t* invalid;            // [1]
  int32_t* route_scratch;
  bool by_assignments;  // routes_by_assignments()
  int eager;            // the first `eager` tokens are eager
  char* landing;        // [R, eager] landing slots; null if tokens land in `rows`

  // Whether tokens land in their final slots of `rows`.
  JAX_EP_CONSTANT_FN bool lands_in_rows() const { return !expand && wire != Wire::float8; }
};

// Bytes of a row in the op's dtype.
template <class Args>
JAX_EP_CONSTANT_FN int64_t row_bytes(const Args& args) {
  return int64_t{args.hidden} * size_of(args.dtype);
}

// Bytes of a token's landing slot, by wire: a float8 message, float8 values and their scales, or plain values.
JAX_EP_CONSTANT_FN int64_t landing_slot_bytes(const DispatchArgs& a) {
  if (a.wire == Wire::float8) return wire_bytes(a.hidden);
  return a.wire == Wire::float8_rows ? (int64_t{a.hidden} + scale_row_bytes(a.hidden) + 15) / 16 * 16 : row_bytes(a);
}

// DispatchArgs for each kernel. The plain kernels have one routing each, which they name here: a shorter kernel is
// faster where tokens are few.
struct FewDispatchArgs : DispatchArgs {
  static constexpr bool by_assignments = true;
};
struct GroupedDispatchArgs : DispatchArgs {  // for the kernel that takes tokens in groups
  static constexpr bool by_assignments = false;
};
struct PlainDispatchArgs : DispatchArgs {
  static constexpr bool by_assignments = false;
};
struct Float8DispatchArgs : DispatchArgs {};
struct Float8RowsDispatchArgs : DispatchArgs {};

// The leaves of a user's routing in scatter and combine. A report's `detail` is the leaf with a value out of bounds.
enum class RoutingLeaf : int32_t { targets, row_of, counts };
struct RoutedDefaults : OpDefaults {
  static std::string describe_invalid(const Report& report) {
    constexpr const char* kLeaves[] = {"targets", "row_of", "counts"};
    if (report.detail < 0 || report.detail >= int64_t{std::size(kLeaves)}) return OpDefaults::describe_invalid(report);
    return concat("routing.", kLeaves[report.detail], " holds ", report.seen,
                  ", which is out of bounds: it must be below ", report.expected,
                  report.detail == static_cast<int>(RoutingLeaf::counts) ? " and not negative" : "");
  }
};

struct ScatterArgs {
  DType dtype;
  int num_tokens, top_k, hidden, local_experts, capacity, alignment;
  bool onto;                // `rows` starts as an operand and keeps rows without a token; no counts
  bool zero_unused = true;  // zeroes rows after the last expert's
  const char* tokens;       // [T, H]
  const int32_t* targets;   // [T, K]
  const int32_t* row_of;    // [R, T, K]
  const int32_t* counts;    // [R, L], or null
  char* rows;               // [C, H]
};

// ScatterArgs for the kernel that takes tokens in groups.
struct GroupedScatterArgs : ScatterArgs {};

struct CombineArgs {
  DType dtype;
  int num_tokens, top_k, hidden, capacity;
  bool weighted, returning;  // whether there are weights, and scalars
  const char* rows;          // [C, H]
  const float* weights;      // [R, T, K], or null for 1
  const float* scalars;      // [R, T, K] to return to their token's rank, or null
  const int32_t* targets;    // [T, K]
  const int32_t* row_of;     // [R, T, K]
  char* combined;            // [T, H]
  float* returned;           // [T, K], or null
  char* landing;             // [R, T, H] partial sums
};

// CombineArgs for the kernel that takes tokens in groups.
struct GroupedCombineArgs : CombineArgs {};
// The terms of a token's sum: a row of each peer, and this rank's own rows.
JAX_EP_CONSTANT_FN int combine_width(const CombineArgs& args, int ranks) { return ranks - 1 + args.top_k; }

// What is wrong with the rows of an op with a routing.
template <class Args>
std::optional<std::string> validate_counts(const Args& args, int ranks) {
  const int64_t assignments = int64_t{args.num_tokens} * args.top_k;
  const std::string below = concat("below (", kCountable, ") / ", ranks, " ranks");
  if (std::optional<std::string> error = validate_row(args.hidden)) return error;
  if (!is_countable(assignments) || !is_countable(ranks * assignments))
    return wrong("num_tokens * top_k", below, assignments);
  return is_countable(int64_t{ranks} * args.capacity) ? std::nullopt
                                                      : std::optional(wrong("capacity", below, args.capacity));
}
// What is wrong with the layout of rows of a dispatch, or of combine's gradient.
template <class Args>
std::optional<std::string> validate_layout(const Args& args, int ranks) {
  if (args.alignment <= 0) return wrong("alignment", "positive", args.alignment);
  if (args.capacity % args.alignment)
    return wrong("capacity", concat("a multiple of alignment ", args.alignment), args.capacity);
  return validate_counts(args, ranks);
}

template <>
struct OpSpec<DispatchArgs> : OpDefaults {
  using Args = DispatchArgs;
  static constexpr const char* kFfiTarget = "dispatch";
  static constexpr KindName kKinds[] = {{OpKind::dispatch, "dispatch"}};
  static constexpr LaunchPolicy kLaunch{Senders::by_dispatch_rates};  // few tokens may become many rows

  template <class Visit>
  static constexpr void settings(Visit visit) {
    visit("dtype", nullptr, &Args::dtype);
    visit("num_tokens", "T", &Args::num_tokens);
    visit("top_k", "K", &Args::top_k);
    visit("hidden", "H", &Args::hidden);
    visit("num_experts", "E", &Args::num_experts);
    visit("capacity", "capacity", &Args::capacity);
    visit("alignment", "alignment", &Args::alignment);
    visit("wire", "wire", &Args::wire);
    visit("drop", "drop", &Args::drop);
    visit("expand", "expand", &Args::expand);
    visit("zero_unused", "zero_unused", &Args::zero_unused);
  }
  static void complete(Args& args, int, bool) {
    args.by_assignments = routes_by_assignments(args.num_tokens, args.top_k);
    args.eager = args.expand ? eager_tokens(args.num_tokens, args.top_k, row_bytes(args), args.wire) : args.num_tokens;
  }
  static std::optional<std::string> validate(const Args& args, int ranks) {
    if (args.num_experts % ranks)
      return wrong("num_experts", concat("a multiple of ", ranks, " ranks"), args.num_experts);
    if (args.num_experts > kMaxExperts) return wrong("num_experts", concat("at most ", kMaxExperts), args.num_experts);
    if (args.wire != Wire::plain && args.hidden % kScaleBlock)
      return wrong("hidden", concat("a multiple of ", kScaleBlock, " where rows travel in float8"), args.hidden);
    if (std::optional<std::string> error = validate_layout(args, ranks)) return error;
    const int64_t padding = int64_t{args.num_experts / ranks} * args.alignment;
    const int64_t rows = int64_t{ranks} * args.num_tokens * args.top_k + padding;
    if (is_countable(rows)) return std::nullopt;
    return wrong("rows with their padding", concat("fewer than ", kCountable), rows);
  }
  static WorkSize work_size(const Args& args) {
    return {args.num_tokens, args.wire != Wire::plain, args.top_k, row_bytes(args)};
  }

  // Peers write `rows` and `scales` if some tokens do not go through `landing`, and `row_of` and `weights` unless each
  // rank computes the whole routing.
  template <class Visit>
  JAX_EP_CONSTANT_FN static void buffers(const Args& a, int ranks, Visit visit) {
    const int tokens = a.num_tokens, top_k = a.top_k, local = a.num_experts / ranks;
    const bool straight = a.eager < tokens || a.lands_in_rows();
    const bool float8 = a.wire == Wire::float8_rows;
    const int64_t moved = a.expand ? a.capacity : int64_t{ranks} * tokens;
    const Values rows = float8 ? Values::float8 : values_of(a.dtype);
    visit(operand("tokens", values_of(a.dtype), tokens, a.hidden), &Args::tokens);
    visit(operand("expert_ids", Values::int32, tokens, top_k), &Args::expert_ids);
    visit(operand("token_weights", Values::float32, tokens, top_k), &Args::token_weights);
    visit(result("rows", rows, moved, a.hidden).for_peers(straight), &Args::rows);
    visit(result("row_of", Values::int32, ranks, tokens, top_k).for_peers(!a.by_assignments), &Args::row_of);
    visit(result("weights", Values::float32, ranks, tokens, top_k).for_peers(!a.by_assignments), &Args::weights);
    visit(result("scales", Values::float32, moved, a.hidden / kScaleBlock).when(float8).for_peers(straight),
          &Args::scales);
    visit(result("indices", Values::int32, a.capacity).when(!a.expand).undelivered_as(Undelivered::index),
          &Args::indices);
    visit(result("group_sizes", Values::int32, local).undelivered_as(Undelivered::size), &Args::group_sizes);
    visit(result("targets", Values::int32, tokens, top_k).undelivered_as(Undelivered::index), &Args::targets);
    visit(result("counts", Values::int32, ranks, local).undelivered_as(Undelivered::size), &Args::counts);
    visit(result("dropped", Values::int32, 1).undelivered_as(Undelivered::size), &Args::dropped);
    visit(result("invalid", Values::int32, 1).undelivered_as(Undelivered::size), &Args::invalid);
    const BufferSpec landing = scratch("landing", Values::uint8, ranks, a.eager, landing_slot_bytes(a));
    visit(landing.when(!a.lands_in_rows()).for_peers(), &Args::landing);
    visit(scratch("route_scratch", Values::int32, route_scratch_ints(a.num_experts, ranks, a.drop)),
          &Args::route_scratch);
  }
};

template <>
struct OpSpec<ScatterArgs> : RoutedDefaults {
  using Args = ScatterArgs;
  static constexpr const char* kFfiTarget = "scatter";
  static constexpr KindName kKinds[] = {{OpKind::scatter, "scatter"}};
  static constexpr LaunchPolicy kLaunch{Senders::by_dispatch_rates, Ctas::one_an_item};

  template <class Visit>
  static constexpr void settings(Visit visit) {
    visit("dtype", nullptr, &Args::dtype);
    visit("num_tokens", "T", &Args::num_tokens);
    visit("top_k", "K", &Args::top_k);
    visit("hidden", "H", &Args::hidden);
    visit("local_experts", "E / R", &Args::local_experts);
    visit("capacity", "capacity", &Args::capacity);
    visit("alignment", "alignment", &Args::alignment);
    visit("onto", "onto rows", &Args::onto);
    visit("zero_unused", "zero_unused", &Args::zero_unused);
  }
  static std::optional<std::string> validate(const Args& args, int ranks) { return validate_layout(args, ranks); }
  static WorkSize work_size(const Args& args) {
    const bool zeroes = !args.onto && args.zero_unused;
    return {zeroes ? std::max(args.num_tokens, args.capacity) : args.num_tokens, false, args.top_k, row_bytes(args)};
  }

  template <class Visit>
  JAX_EP_CONSTANT_FN static void buffers(const Args& a, int ranks, Visit visit) {
    visit(operand("tokens", values_of(a.dtype), a.num_tokens, a.hidden), &Args::tokens);
    visit(operand("targets", Values::int32, a.num_tokens, a.top_k), &Args::targets);
    visit(operand("row_of", Values::int32, ranks, a.num_tokens, a.top_k), &Args::row_of);
    visit(operand("counts", Values::int32, ranks, a.local_experts).when(!a.onto), &Args::counts);
    const BufferSpec rows = a.onto ? any_rows("rows", Use::updated, a.capacity, row_bytes(a))
                                   : result("rows", values_of(a.dtype), a.capacity, a.hidden);
    visit(rows.for_peers(), &Args::rows);
  }
};

template <>
struct OpSpec<CombineArgs> : RoutedDefaults {
  using Args = CombineArgs;
  static constexpr const char* kFfiTarget = "combine";
  static constexpr KindName kKinds[] = {{OpKind::combine, "combine"}};
  static constexpr LaunchPolicy kLaunch{Senders::by_combine_rates};

  template <class Visit>
  static constexpr void settings(Visit visit) {
    visit("dtype", nullptr, &Args::dtype);
    visit("num_tokens", "T", &Args::num_tokens);
    visit("top_k", "K", &Args::top_k);
    visit("hidden", "H", &Args::hidden);
    visit("capacity", "capacity", &Args::capacity);
    visit("weighted", "weights", &Args::weighted);
    visit("returning", "scalars", &Args::returning);
  }
  static std::optional<std::string> validate(const Args& args, int ranks) { return validate_counts(args, ranks); }
  static WorkSize work_size(const Args& args) { return {args.num_tokens, false, args.top_k, row_bytes(args)}; }

  template <class Visit>
  JAX_EP_CONSTANT_FN static void buffers(const Args& a, int ranks, Visit visit) {
    const Values values = values_of(a.dtype);
    const int tokens = a.num_tokens;
    visit(operand("rows", values, a.capacity, a.hidden), &Args::rows);
    visit(operand("weights", Values::float32, ranks, tokens, a.top_k).when(a.weighted), &Args::weights);
    visit(operand("scalars", Values::float32, ranks, tokens, a.top_k).when(a.returning), &Args::scalars);
    visit(operand("targets", Values::int32, tokens, a.top_k), &Args::targets);
    visit(operand("row_of", Values::int32, ranks, tokens, a.top_k), &Args::row_of);
    visit(scratch("landing", values, ranks, tokens, a.hidden).for_peers(), &Args::landing);
    visit(result("combined", values, tokens, a.hidden), &Args::combined);
    visit(result("returned", Values::float32, tokens, a.top_k).when(a.returning).for_peers(), &Args::returned);
  }
};

}  // namespace jax_ep
