// Where the tokens of a dispatch land at the owners of their experts, and from where they go to their rows there.
#pragma once

#include "comm/window.h"
#include "kernels/moe/args.h"
#include "kernels/moe/rows.h"

namespace jax_ep {

// Where a token in float8 lands, and its scales.
struct Spot {
  char *values, *scales;
};

// Eager tokens in a landing slot of their own, for every token of every rank, at each rank: who owns them follows from
// their experts. The others in their first row at every owner, and those of this rank in all of their rows.
class Landing {
 public:
  JAX_EP_FN Landing(const Op& op, const DispatchArgs& args, int value_bytes)
      : op_(op),
        args_(args),
        row_bytes_(int64_t{args.hidden} * value_bytes),
        slot_bytes_(landing_slot_bytes(args.hidden, value_bytes, args.wire_float8, args.rows_float8)),
        by_owner_(args.num_experts / op.comm.size),
        rows_(op, args.targets, args.top_k, args.capacity, kWindow<&DispatchArgs::received>),
        scales_(op, args.targets, args.top_k, args.capacity, kWindow<&DispatchArgs::scales>),
        slots_(op, kWindow<&DispatchArgs::landing>) {}

  JAX_EP_FN int64_t slot_bytes() const { return slot_bytes_; }
  JAX_EP_FN bool is_eager(int token) const { return token < args_.eager; }

  // What push_items asks for ahead of a token's k-th assignment: its packed target, or the expert of an eager token.
  JAX_EP_FN int packed(int token, int k) const {
    if (!is_eager(token)) return rows_.packed(token, k);
    return k < args_.top_k ? args_.expert_ids[int64_t{token} * args_.top_k + k] : -1;
  }
  // All lanes ask together, each for its own k. Where the token lands, alone or with its scales.
  JAX_EP_FN char* at_owner(int token, int k, int packed) const {
    return is_eager(token) ? slot_at_owner(token, k, packed) : rows_.row(token, k, row_bytes_, packed);
  }
  JAX_EP_FN Spot spot_at_owner(int token, int k, int packed) const {
    if (is_eager(token)) {
      char* slot = slot_at_owner(token, k, packed);
      return {slot, slot ? slot + args_.hidden : nullptr};
    }
    const Target target = rows_.target(token, k, packed);
    return {rows_.row_at(target, row_bytes_), scales_.row_at(target, scale_row_bytes(args_.hidden))};
  }
  // As at_owner(), but null where an eager token would travel to its own rank.
  JAX_EP_FN char* at_peer(int token, int k, int packed) const {
    char* there = at_owner(token, k, packed);
    return is_eager(token) && owner_of(packed) == op_.comm.rank ? nullptr : there;
  }

  // Where a token has landed here, and its scales, if `row` is the first of its rows.
  JAX_EP_FN const char* here(int source, int token, int row) const {
    return is_eager(token) ? slot_here(source, token) : args_.received + row * row_bytes_;
  }
  JAX_EP_FN const char* slot_here(int source, int token) const { return args_.landing + slot(source, token); }
  JAX_EP_FN const char* scales_here(int source, int token, int row) const {
    if (is_eager(token)) return slot_here(source, token) + args_.hidden;
    return reinterpret_cast<const char*>(args_.scales) + int64_t{row} * scale_row_bytes(args_.hidden);
  }

 private:
  JAX_EP_FN char* slot_at_owner(int token, int k, int packed_k) const {
    const int owner = owner_of(packed_k);
    const auto owner_before = [&](int j) { return owner_of(packed(token, j)); };
    const bool first = first_at_owner(op_.coop, args_.top_k, k, owner, owner_before);
    char* base = slots_.peer(owner);
    return first && base ? base + slot(op_.comm.rank, token) : nullptr;
  }
  JAX_EP_FN int64_t slot(int source, int token) const { return (int64_t{source} * args_.eager + token) * slot_bytes_; }
  JAX_EP_FN int owner_of(int expert) const {
    return expert >= 0 && expert < args_.num_experts ? by_owner_.quotient(expert) : -1;
  }

  const Op& op_;
  const DispatchArgs& args_;
  const int64_t row_bytes_, slot_bytes_;
  const Divider by_owner_;
  const RowSink rows_, scales_;
  const LaneWindow<char> slots_;
};

}  // namespace jax_ep
