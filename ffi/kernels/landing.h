// Where the tokens of a dispatch land at the owners of their experts, and from where they go to their rows there.
#pragma once

#include "kernels/args.h"
#include "kernels/rows.h"

namespace jax_ep {

// Where a token in float8 lands, and its scales.
struct Spot {
  char *values, *scales;
};

// In their first row at every owner, and those of this rank in all of their rows. Their places must be known.
class RowLanding {
 public:
  static constexpr bool kSlots = false;

  JAX_EP_FN RowLanding(const Op& op, const DispatchArgs& args, int value_bytes)
      : args_(args),
        row_bytes_(int64_t{args.hidden} * value_bytes),
        rows_(op, args.targets, args.top_k, args.capacity),
        scales_(op, args.targets, args.top_k, args.capacity, 3) {}

  // What push_items asks for early of a token's k-th assignment.
  JAX_EP_FN int packed(int token, int k) const { return rows_.packed(token, k); }
  // Where that lands, alone or with its scales. All lanes ask together, each for its own k.
  JAX_EP_FN char* at_owner(int token, int k, int packed) const { return rows_.row(token, k, row_bytes_, packed); }
  JAX_EP_FN Spot spot_at_owner(int token, int k, int packed) const {
    const Target target = rows_.target(token, k, packed);
    return {rows_.row_at(target, row_bytes_), scales_.row_at(target, scale_row_bytes(args_.hidden))};
  }

  // Where a token has landed here, and its scales, if `row` is the first of its rows.
  JAX_EP_FN const char* here(int, int, int row) const { return args_.received + row * row_bytes_; }
  JAX_EP_FN const char* scales_here(int, int, int row) const {
    return reinterpret_cast<const char*>(args_.scales) + int64_t{row} * scale_row_bytes(args_.hidden);
  }

 private:
  const DispatchArgs& args_;
  const int64_t row_bytes_;
  const RowSink rows_, scales_;
};

// In a slot of its own for every token of every rank, at each rank: for tokens that are encoded, and for few, which set
// off before their places are known. Who owns them then follows from their experts.
class SlotLanding {
 public:
  static constexpr bool kSlots = true;

  JAX_EP_FN SlotLanding(const Op& op, const DispatchArgs& args, int value_bytes)
      : op_(op),
        args_(args),
        slot_bytes_(landing_slot_bytes(args.few, args.hidden, value_bytes, args.wire_float8, args.rows_float8)),
        owned_(args.few ? args.expert_ids : args.targets),
        end_(args.few ? args.num_experts : args.capacity * op.comm.size),
        by_owner_(args.few ? args.num_experts / op.comm.size : args.capacity),
        bases_(op, 0) {}

  JAX_EP_FN int packed(int token, int k) const {
    return k < args_.top_k ? owned_[int64_t{token} * args_.top_k + k] : -1;
  }
  JAX_EP_FN char* at_owner(int token, int k, int packed_k) const {
    const int owner = owner_of(packed_k);
    const auto owner_before = [&](int j) { return owner_of(packed(token, j)); };
    const bool first = first_at_owner(op_.team, args_.top_k, k, owner, owner_before);
    char* base = bases_.of(owner);
    return first && base ? base + offset(op_.comm.rank, token) : nullptr;
  }
  JAX_EP_FN Spot spot_at_owner(int token, int k, int packed) const {
    char* slot = at_owner(token, k, packed);
    return {slot, slot ? slot + args_.hidden : nullptr};
  }
  // The same for tokens of this rank that do not travel to itself.
  JAX_EP_FN char* at_peer(int token, int k, int packed) const {
    char* slot = at_owner(token, k, packed);
    return owner_of(packed) == op_.comm.rank ? nullptr : slot;
  }

  JAX_EP_FN const char* here(int source, int token, int = 0) const { return args_.landing + offset(source, token); }
  JAX_EP_FN const char* scales_here(int source, int token, int) const { return here(source, token) + args_.hidden; }

 private:
  JAX_EP_FN int64_t offset(int source, int token) const {
    return (int64_t{source} * args_.num_tokens + token) * slot_bytes_;
  }
  JAX_EP_FN int owner_of(int packed) const { return packed >= 0 && packed < end_ ? by_owner_.quotient(packed) : -1; }

  const Op& op_;
  const DispatchArgs& args_;
  const int64_t slot_bytes_;
  const int32_t* const owned_;
  const int end_;
  const Divider by_owner_;
  const PeerBuffer bases_;
};

}  // namespace jax_ep
