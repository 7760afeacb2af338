// The arguments of ragged_all_to_all: pointers into XLA's buffers of this rank, and the sizes.
#pragma once

#include <cstdint>

#include "comm/signal_pad.h"
#include "kernels/op_spec.h"

namespace jax_ep {

struct RaggedArgs {
  int slices;  // per peer
  int64_t operand_rows, output_rows, row_bytes;
  const char* operand;
  const int32_t *input_offsets, *send_sizes, *output_offsets, *recv_sizes;  // [R, slices]
  char* output;
};

template <>
struct OpSpec<RaggedArgs> : OpDefaults {
  using Args = RaggedArgs;
  static constexpr const char* kFfiTarget = "ragged_all_to_all";
  static constexpr KindName kKinds[] = {{OpKind::ragged_all_to_all, "ragged_all_to_all"}};

  template <class Visit>
  static constexpr void settings(Visit visit) {
    visit("slices", "slices", &Args::slices);
    visit("operand_rows", "operand rows", &Args::operand_rows);
    visit("output_rows", "output rows", &Args::output_rows);
    visit("row_bytes", "row bytes", &Args::row_bytes);
  }
  static std::optional<std::string> validate(const Args& args, int) {
    if (args.slices > kMailNumbers)
      return wrong("slices", concat("at most ", kMailNumbers, ", what a mailbox holds"), args.slices);
    const std::string below = concat("below ", kCountable);
    if (!is_countable(args.operand_rows)) return wrong("operand_rows", below, args.operand_rows);
    if (!is_countable(args.output_rows)) return wrong("output_rows", below, args.output_rows);
    if (args.row_bytes >> 32) return wrong("row_bytes", "below 4 GiB", args.row_bytes);
    return std::nullopt;
  }
  static std::string describe_invalid(const Report& report) {
    if (report.detail == kElsewhere) return "on another rank a slice lies outside its buffer or is too long";
    return concat("with rank ", report.peer,
                  " a slice lies outside its buffer or has another size than the receiver expects: it must be at most ",
                  report.expected, ", got ", report.seen);
  }

  template <class Visit>
  JAX_EP_CONSTANT_FN static void buffers(const Args& a, int ranks, Visit visit) {
    const int64_t all = int64_t{ranks} * a.slices;
    visit(any_rows("operand", Use::operand, a.operand_rows, a.row_bytes), &Args::operand);
    visit(operand("input_offsets", Values::int32, all), &Args::input_offsets);
    visit(operand("send_sizes", Values::int32, all), &Args::send_sizes);
    visit(operand("output_offsets", Values::int32, all), &Args::output_offsets);
    visit(operand("recv_sizes", Values::int32, all), &Args::recv_sizes);
    visit(any_rows("output", Use::updated, a.output_rows, a.row_bytes).for_peers(), &Args::output);
  }
};

}  // namespace jax_ep
