// Who gets what, where: the only arithmetic on rows, segments and shares.
#pragma once

#include <cstdint>

#include "comm/integers.h"
#include "comm/platform.h"

namespace jax_ep {

struct Range {
  int begin, end;
};

// The contiguous share of `items` that one coop of `count` takes.
JAX_EP_FN Range share(int items, int index, int count) {
  return {static_cast<int>(int64_t{items} * index / count), static_cast<int>(int64_t{items} * (index + 1) / count)};
}

// A token's row at the rank that owns the expert, as one number; -1 stands for none.
struct Target {
  int owner, row;
};
JAX_EP_FN int pack_target(Target target, int capacity) { return target.owner * capacity + target.row; }
JAX_EP_FN Target unpack_target(int packed, int capacity, const Divider& by_capacity) {
  const int owner = by_capacity.quotient(packed);
  return {owner, packed - owner * capacity};
}

// The first of a few values in registers, where the others move up: a rolled loop cannot count through them.
template <class Value, int kCount>
JAX_EP_FN Value pop_front(Value (&values)[kCount]) {
  const Value first = values[0];
  for (int i = 0; i < kCount - 1; ++i) values[i] = values[i + 1];
  return first;
}

// One local expert's rows: [start, start + rows) hold tokens, up to start + padded are zero.
struct Segment {
  int start, rows, padded;
};

// Lays out the local experts in order, a lane each: all lanes call visit(expert, segment) together, with an empty
// segment behind the last expert. Returns the end of the last segment; `rows_of(expert)` counts its assignments.
template <class RowsOf, class Visit>
JAX_EP_FN int for_each_segment(const Coop& coop, int local_experts, int alignment, RowsOf rows_of, Visit visit) {
  constexpr int kAhead = Coop::lanes == 1 ? 1 : 4;
  int start = 0;
  for (int first = 0; first < local_experts; first += kAhead * Coop::lanes) {
    int rows[kAhead];  // all on their way before the first is needed
    for (int i = 0; i < kAhead; ++i) {
      const int expert = first + i * Coop::lanes + coop.lane;
      rows[i] = expert < local_experts ? rows_of(expert) : 0;
    }
    JAX_EP_ROLLED
    for (int i = 0; i < kAhead && first + i * Coop::lanes < local_experts; ++i) {
      const int mine = pop_front(rows), padded = align_up(mine, alignment);
      int total = 0;
      const int before = coop.exclusive_scan(padded, &total);
      visit(first + i * Coop::lanes + coop.lane, Segment{start + before, mine, padded});
      start += total;
    }
  }
  return start;
}

// The most coops of a rank that count ids of sparse_union, and of any CTA: scratch is sized the same everywhere.
constexpr int kMaxCoops = 1024, kMaxCtaCoops = 8;

// Scratch of routing, in int32: a histogram per coop of the router CTAs and per router CTA, then per expert the first
// row of this rank's share and the rows of all ranks, then per rank the rows it needs; where rows may be dropped, two
// tables more (kernels/moe/segments.h). A histogram has a bin per expert, and one for invalid ids.
constexpr int kMaxRouters = 16;
JAX_EP_CONSTANT_FN int64_t histogram_ints(int num_experts) { return num_experts + 1; }
JAX_EP_CONSTANT_FN int64_t cta_bins_offset(int num_experts) {
  return kMaxRouters * kMaxCtaCoops * histogram_ints(num_experts);
}
JAX_EP_CONSTANT_FN int64_t first_rows_offset(int num_experts) {
  return cta_bins_offset(num_experts) + kMaxRouters * histogram_ints(num_experts);
}
JAX_EP_CONSTANT_FN int64_t totals_offset(int num_experts) { return first_rows_offset(num_experts) + num_experts; }
JAX_EP_CONSTANT_FN int64_t needed_offset(int num_experts) { return totals_offset(num_experts) + num_experts; }
JAX_EP_CONSTANT_FN int64_t shifts_offset(int num_experts, int ranks) { return needed_offset(num_experts) + ranks; }
JAX_EP_CONSTANT_FN int64_t ends_offset(int num_experts, int ranks) {
  return shifts_offset(num_experts, ranks) + int64_t{ranks} * num_experts;
}
JAX_EP_CONSTANT_FN int64_t route_scratch_ints(int num_experts, int ranks, bool drop) {
  return drop ? ends_offset(num_experts, ranks) + int64_t{ranks} * num_experts : shifts_offset(num_experts, ranks);
}

struct RouteScratch {
  int32_t* ints;
  int num_experts, ranks;

  JAX_EP_FN int32_t* first_rows() const { return ints + first_rows_offset(num_experts); }
  JAX_EP_FN int32_t* totals() const { return ints + totals_offset(num_experts); }
  JAX_EP_FN int32_t* needed() const { return ints + needed_offset(num_experts); }
  JAX_EP_FN int32_t* shifts() const { return ints + shifts_offset(num_experts, ranks); }
  JAX_EP_FN int32_t* ends() const { return ints + ends_offset(num_experts, ranks); }
};

// CTAs that take part in routing.
JAX_EP_FN int router_ctas(int assignments, int per_cta, int ctas) {
  const int wanted = ceil_div(assignments, per_cta);
  return larger(1, smaller(wanted, smaller(ctas, kMaxRouters)));
}

// A rank's contiguous range of the rows of a table; empty behind the last.
JAX_EP_FN Range row_range(int num_rows, int rank, int ranks) {
  const int64_t rows = (int64_t{num_rows} + ranks - 1) / ranks, begin = rank * rows, end = begin + rows;
  return {static_cast<int>(begin < num_rows ? begin : num_rows), static_cast<int>(end < num_rows ? end : num_rows)};
}

// The owner of a row among its holders, a bit per rank: each in turn, but mixed by a hash, so that no pattern of ids
// gives one rank more than its share.
JAX_EP_FN int pick_owner(uint64_t holders, int slot) {
  const uint32_t mixed = static_cast<uint32_t>(slot) * 0x9e3779b1u;
  int left = static_cast<int>((uint64_t{mixed} * static_cast<uint32_t>(count_bits(holders))) >> 32);
  for (; left > 0; --left) holders &= holders - 1;
  return lowest_bit(holders);
}

// Scratch of sparse_union, in int32: a bit per row of the table and one more, ids below each word, ids per coop.
JAX_EP_CONSTANT_FN int bitmap_words(int num_rows) { return num_rows / 32 + 1; }
JAX_EP_CONSTANT_FN int64_t bitmap_prefix_offset(int num_rows) { return bitmap_words(num_rows); }
JAX_EP_CONSTANT_FN int64_t bitmap_counts_offset(int num_rows) { return 2 * int64_t{bitmap_words(num_rows)}; }
JAX_EP_CONSTANT_FN int64_t bitmap_scratch_ints(int num_rows) { return bitmap_counts_offset(num_rows) + kMaxCoops; }

// The landing of sparse_reduce: where the part of each holder lies, by slot, then room for parts of every other rank.
// None where the result is sharded: its owners would have little left to do but to wait.
JAX_EP_CONSTANT_FN int landing_room(int entries, int ranks, bool sharded) {
  return ranks > 1 && !sharded ? (entries + ranks - 2) / (ranks - 1) : 0;
}
JAX_EP_CONSTANT_FN int64_t landing_table_bytes(int ranks, int slots) {
  return (int64_t{ranks} * slots * 4 + 127) / 128 * 128;
}
JAX_EP_CONSTANT_FN int64_t landing_bytes(int ranks, int slots, int room, int64_t row_bytes) {
  return landing_table_bytes(ranks, slots) + int64_t{room} * (ranks - 1) * row_bytes;
}

// A coop's shared memory, where rows come in bulk, begins with barriers.
constexpr int kBarrierBytes = 128;

// Rows in float8 travel as messages: up to kWireValues values, a float32 scale per block, padding to 16-byte words.
constexpr int kScaleBlock = 128;
constexpr int kWireValues = 2048;
JAX_EP_CONSTANT_FN int wire_message_bytes(int values) { return (values + 4 * (values / kScaleBlock) + 15) / 16 * 16; }
// Where the message that begins with value `first` of a row lies in its landing slot, and the size of a landing slot.
JAX_EP_CONSTANT_FN int64_t wire_offset(int first) {
  return int64_t{first / kWireValues} * wire_message_bytes(kWireValues);
}
JAX_EP_CONSTANT_FN int64_t wire_bytes(int hidden) {
  return wire_offset(hidden) + wire_message_bytes(hidden % kWireValues);
}

JAX_EP_CONSTANT_FN int scale_row_bytes(int hidden) { return hidden / kScaleBlock * 4; }

// Bytes of a token's landing slot: messages in float8, values in float8 and behind them their scales, or values as they
// are.
JAX_EP_CONSTANT_FN int64_t landing_slot_bytes(int hidden, int value_bytes, bool wire_float8, bool rows_float8) {
  if (wire_float8 && !rows_float8) return wire_bytes(hidden);
  return rows_float8 ? (int64_t{hidden} + scale_row_bytes(hidden) + 15) / 16 * 16 : int64_t{hidden} * value_bytes;
}

}  // namespace jax_ep
