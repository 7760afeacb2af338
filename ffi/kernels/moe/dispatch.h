// dispatch: works out the routing, and sends every token once to each rank that owns one of its experts. A token goes
// to its final row at that rank. An eager token, or one that is decoded on arrival, goes to a landing slot first. If
// the op does not expand, the result has a slot for every token, and receivers write the slot of each row.
#pragma once

#include <variant>

#include "comm/window.h"
#include "kernels/moe/args.h"
#include "kernels/moe/routing.h"
#include "kernels/moe/row_groups.h"
#include "kernels/moe/rows.h"
#include "rows/float8_rows.h"
#include "rows/wire.h"

namespace jax_ep {

struct Float8Address {
  char *values, *scales;
};

// The places where tokens land. Every rank has a slot for every eager token of every rank, in `landing` or in `rows`.
// An eager token goes to its slot at every rank that owns one of its experts. Any other token goes to its first row at
// every such rank, and to all of its rows on this rank. Lanes that call together may have different tokens, if all or
// none of these are eager.
class Landing {
 public:
  JAX_EP_FN Landing(const Op& op, const DispatchArgs& args, int value_bytes)
      : op_(op),
        args_(args),
        row_bytes_(int64_t{args.hidden} * value_bytes),
        slot_bytes_(landing_slot_bytes(args)),
        by_owner_(args.num_experts / op.comm.size),
        rows_(op, args.targets, args.top_k, args.capacity, kWindow<&DispatchArgs::rows>),
        scales_(op, args.targets, args.top_k, args.capacity, kWindow<&DispatchArgs::scales>),
        slots_(op, kWindow<&DispatchArgs::landing>) {}

  JAX_EP_FN int64_t slot_bytes() const { return slot_bytes_; }
  JAX_EP_FN bool is_eager(int token) const { return token < args_.eager; }

  // What push_items loads ahead for a token's k-th assignment: the expert if the token is eager, else the packed
  // target.
  JAX_EP_FN int packed(int token, int k) const {
    if (!is_eager(token)) return rows_.packed(token, k);
    return token >= 0 && k < args_.top_k ? args_.expert_ids[int64_t{token} * args_.top_k + k] : -1;
  }
  // Where the token lands, without or with the place of its scales. All lanes call, each with its own k.
  JAX_EP_FN char* at_owner(int token, int k, int packed) const {
    return is_eager(token) && !args_.lands_in_rows() ? slot_at_owner(token, k, packed)
                                                     : rows_.row_at(target(token, k, packed), row_bytes_);
  }
  JAX_EP_FN Float8Address float8_at_owner(int token, int k, int packed) const {
    if (is_eager(token) && !args_.lands_in_rows()) {
      char* slot = slot_at_owner(token, k, packed);
      return {slot, slot ? slot + args_.hidden : nullptr};
    }
    const Target there = target(token, k, packed);
    return {rows_.row_at(there, row_bytes_), scales_.row_at(there, scale_row_bytes(args_.hidden))};
  }
  // at_owner(), or null for an eager token whose owner is this rank if the op expands: expand() copies it from
  // `tokens`.
  JAX_EP_FN char* at_peer(int token, int k, int packed) const {
    char* there = at_owner(token, k, packed);
    const bool copied = args_.expand && is_eager(token) && owner_of(packed) == op_.comm.rank;
    return copied ? nullptr : there;
  }

  // Where a token has landed here, and its scales. `row`: the first of its rows.
  JAX_EP_FN const char* landed_at(int source, int token, int row) const {
    return is_eager(token) ? landed_slot(source, token) : args_.rows + row * row_bytes_;
  }
  JAX_EP_FN const char* landed_slot(int source, int token) const {
    return args_.landing + slot(source, token) * slot_bytes_;
  }
  JAX_EP_FN const char* landed_scales(int source, int token, int row) const {
    if (is_eager(token)) return landed_slot(source, token) + args_.hidden;
    return reinterpret_cast<const char*>(args_.scales) + int64_t{row} * scale_row_bytes(args_.hidden);
  }

  JAX_EP_FN int64_t slot(int source, int token) const { return int64_t{source} * args_.eager + token; }

 private:
  // Where in `rows` the token lands: in its slot, or in its first row.
  JAX_EP_FN Target target(int token, int k, int packed) const {
    if (!is_eager(token)) return rows_.target(token, k, packed);
    return {first_owner(token, k, packed), static_cast<int>(slot(op_.comm.rank, token))};
  }
  JAX_EP_FN char* slot_at_owner(int token, int k, int packed) const {
    char* base = slots_.peer(first_owner(token, k, packed));
    return base ? base + slot(op_.comm.rank, token) * slot_bytes_ : nullptr;
  }
  // The owner of an eager token's k-th expert; -1 if there is no such expert, or an earlier expert has the same owner.
  JAX_EP_FN int first_owner(int token, int k, int packed_k) const {
    const int owner = owner_of(packed_k);
    const auto owner_before = [&](int j) { return owner_of(packed(token, j)); };
    return first_at_owner(op_.coop, args_.top_k, token, k, owner, owner_before) ? owner : -1;
  }
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

JAX_EP_FN const int32_t* rows_from(const DispatchArgs& args, int source) {
  return args.row_of + int64_t{source} * args.num_tokens * args.top_k;
}

// Writes the index of each row of a source's tokens: the slot in which the token has landed. All lanes call. Returns
// how many of the tokens have a row here.
JAX_EP_FN int write_indices(const Coop& coop, const DispatchArgs& args, int source, Range tokens) {
  const int32_t* table = rows_from(args, source);
  int tokens_here = 0;
  for (int begin = tokens.begin * args.top_k; begin < tokens.end * args.top_k; begin += Coop::lanes) {
    const int i = begin + coop.lane, token = i / args.top_k;
    const int row = i < tokens.end * args.top_k ? table[i] : -1;
    bool first = row >= 0;
    for (int j = token * args.top_k; first && j < i; ++j) first = table[j] < 0;
    if (row >= 0) args.indices[row] = source * args.num_tokens + token;
    tokens_here += count_bits(coop.ballot(first));
  }
  return tokens_here;
}

// Zeroes padding, and unused rows if args.zero_unused. If the op does not expand, sets the index of both to -1 instead.
JAX_EP_FN void pad_rows(Op& op, const DispatchArgs& args, char* rows, int64_t bytes, const RowCounts& counts) {
  if (args.expand)
    zero_padding(op, args, rows, bytes, counts);
  else
    for_each_gap(op, args, counts, /*unused=*/true, [&](int begin, int end, Part part) {
      const int step = part.count * Coop::lanes;
      for (int row = begin + part.index * Coop::lanes + op.coop.lane; row < end; row += step) args.indices[row] = -1;
    });
}

template <class T>
JAX_EP_FN const char* token_at(const DispatchArgs& args, int token) {
  return token < 0 ? nullptr : args.tokens + int64_t{token} * args.hidden * sizeof(T);
}

JAX_EP_FN WeightedRow<char> term(char* row) { return {row, 1.0f}; }

// Tokens travel in their dtype, one by one or in groups. If the op expands, this rank's own eager tokens do not travel;
// expand() copies them.
template <bool kGrouped>
class PlainDispatch {
 public:
  JAX_EP_FN PlainDispatch(Op& op, const DispatchArgs& args)
      : op_(op), args_(args), bytes_(row_bytes(args)), landing_(op, args, size_of(args.dtype)), mover_(op.coop) {}

  JAX_EP_FN void push(const RoutedTokens& tokens) {
    const auto packed = [&](int token, int k) { return landing_.packed(token, k); };
    const auto source = [&](int token) { return args_.tokens + token * bytes_; };
    const auto sink = [&](int token, int k, int packed) { return landing_.at_peer(token, k, packed); };
    push_tokens<kGrouped>(op_, mover_, tokens, args_.num_tokens, bytes_, args_.top_k, packed, source, sink, [] {});
  }

  JAX_EP_FN void pad(const RowCounts& counts) { pad_rows(op_, args_, args_.rows, bytes_, counts); }

  JAX_EP_FN void expand() {
    if (!args_.expand) return index();
    if constexpr (kGrouped) {
      const auto from = [&](int source, int token, int row) {
        return source == op_.comm.rank ? args_.tokens + token * bytes_ : landing_.landed_at(source, token, row);
      };
      copy_arrivals(op_, mover_, args_.row_of, args_.num_tokens, args_.eager, args_.top_k, args_.rows, bytes_, from);
    } else {
      if (const Part receiver = op_.coop.receiver; !receiver.empty()) {
        op_.enter(Phase::expand);
        copy(op_.comm.rank, Stride{receiver.index, args_.eager, receiver.count},
             [&](int token, int) { return args_.tokens + token * bytes_; });
      }
      for_each_arrival(op_, args_.num_tokens, /*own=*/false, [&](int source, Range tokens) {
        const auto from = [&](int token, int row) { return landing_.landed_at(source, token, row); };
        copy(source, {tokens.begin, tokens.end, 1}, from);
      });
    }
    mover_.complete_to(mover_.puts());
  }

 private:
  JAX_EP_FN void index() {
    for_each_arrival(op_, args_.num_tokens, /*own=*/true, [&](int source, Range tokens) {
      const int tokens_here = write_indices(op_.coop, args_, source, tokens);
      if (op_.coop.lane == 0) op_.count_received(source, tokens_here * bytes_);
    });
  }
  template <class From>
  JAX_EP_FN void copy(int source, Stride tokens, From from) {
    const int tokens_here =
        copy_to_rows(op_.coop, mover_, tokens, args_.rows, bytes_, rows_from(args_, source), args_.top_k, from);
    if (op_.coop.lane == 0) op_.count_received(source, tokens_here * bytes_);
  }

  Op& op_;
  const DispatchArgs& args_;
  const int64_t bytes_;
  const Landing landing_;
  RowMover mover_;
};

// Tokens travel in float8 and are decoded on arrival. This rank's own tokens are encoded and decoded too.
template <class T>
class Float8Dispatch {
 public:
  JAX_EP_FN Float8Dispatch(Op& op, const DispatchArgs& args)
      : op_(op),
        args_(args),
        landing_(op, args, sizeof(T)),
        stream_(op.coop, kWireStageBytes<T>, true, 2 * kWireStageBytes<T>),
        writer_(op.coop, kWireStageBytes<T>, true, 2) {}

  JAX_EP_FN void push(const RoutedTokens& tokens) {
    MessageStream<T, Encode<T>> encoder(op_.coop, args_.hidden, stream_, {writer_});
    const auto begin = [&](int token, auto packed) {
      const auto slots =
          terms_of<char>(op_.coop, args_.top_k, [&](int k) { return term(landing_.at_owner(token, k, packed(k))); });
      encoder.begin(token_at<T>(args_, token), slots);
    };
    push_items(op_, tokens, args_.num_tokens, args_.top_k, landing_, encoder, writer_, begin);
  }

  JAX_EP_FN void pad(const RowCounts& counts) { pad_rows(op_, args_, args_.rows, row_bytes(), counts); }

  JAX_EP_FN void expand() {
    MessageStream<T, Decode<T>> decoder(op_.coop, args_.hidden, stream_, {writer_});
    for_each_arrival(op_, args_.num_tokens, /*own=*/true, [&](int source, Range tokens) {
      stream_.acquire();
      int tokens_here = 0;
      for (int token = tokens.begin; token < tokens.end; ++token) {
        const int32_t* table = rows_from(args_, source) + int64_t{token} * args_.top_k;
        const auto rows = terms_of<char>(op_.coop, args_.top_k, [&](int k) {
          bool wanted = table[k] >= 0;
          for (int j = 0; !args_.expand && wanted && j < k; ++j) wanted = table[j] < 0;
          const int64_t row = args_.expand ? table[k] : landing_.slot(source, token);
          return term(wanted ? args_.rows + row * row_bytes() : nullptr);
        });
        if (rows.empty()) continue;
        decoder.begin(landing_.landed_slot(source, token), rows);
        ++tokens_here;
      }
      if (!args_.expand) write_indices(op_.coop, args_, source, tokens);
      if (op_.coop.lane == 0) op_.count_received(source, tokens_here * landing_.slot_bytes());
    });
    decoder.finish();
    writer_.complete_to(writer_.puts());
  }

 private:
  JAX_EP_FN int64_t row_bytes() const { return int64_t{args_.hidden} * static_cast<int>(sizeof(T)); }

  Op& op_;
  const DispatchArgs& args_;
  const Landing landing_;
  RowStream<char, LaneTerms<char>> stream_;
  RowWriter writer_;
};

// Tokens travel in float8 and stay in float8; so do this rank's own. Values and scales land in different
// buffers, but those of an eager token in one landing slot if the op expands.
template <class T>
class Float8RowsDispatch {
 public:
  JAX_EP_FN Float8RowsDispatch(Op& op, const DispatchArgs& args)
      : op_(op),
        args_(args),
        landing_(op, args, 1),
        message_values_(apart_message_values(args.hidden)),
        put_values_(apart_put_values<T>(op.coop, args.hidden)),
        stream_(op.coop, message_values_ * static_cast<int>(sizeof(T)), true, stage_bytes()),
        writer_(op.coop, stage_bytes(), true, 1) {}

  JAX_EP_FN void push(const RoutedTokens& tokens) {
    MessageStream<T, EncodeApart<T>> encoder(
        op_.coop, args_.hidden, stream_,
        {writer_, scale_row_bytes(args_.hidden) % 16 == 0, message_values_, put_values_});
    const auto begin = [&](int token, auto packed) {
      Float8Address address{};
      int found = -1;  // the assignment of `address`: values and scales are asked for in turn
      const auto at = [&](int k) {
        if (k != found) address = landing_.float8_at_owner(token, k, packed(k));
        found = k;
        return address;
      };
      const auto values = terms_of<char>(op_.coop, args_.top_k, [&](int k) { return term(at(k).values); });
      const auto scales = terms_of<char>(op_.coop, args_.top_k, [&](int k) { return term(at(k).scales); });
      encoder.begin(token_at<T>(args_, token), apart(values, scales));
    };
    push_items(op_, tokens, args_.num_tokens, args_.top_k, landing_, encoder, writer_, begin);
  }

  JAX_EP_FN void pad(const RowCounts& counts) {
    pad_rows(op_, args_, args_.rows, args_.hidden, counts);
    if (args_.expand)
      zero_padding(op_, args_, reinterpret_cast<char*>(args_.scales), scale_row_bytes(args_.hidden), counts);
  }

  JAX_EP_FN void expand() {
    const int scale_bytes = scale_row_bytes(args_.hidden);
    auto* scales = reinterpret_cast<char*>(args_.scales);
    RowMover mover(op_.coop);
    for_each_arrival(op_, args_.num_tokens, /*own=*/true, [&](int source, Range tokens) {
      if (source == op_.comm.rank) tokens.end = smaller(tokens.end, args_.eager);  // later ones are in all their rows
      const int32_t* table = rows_from(args_, source);
      const int tokens_here =
          args_.expand
              ? copy_to_rows(op_.coop, mover, {tokens.begin, tokens.end, 1}, args_.rows, args_.hidden, table,
                             args_.top_k, [&](int token, int row) { return landing_.landed_at(source, token, row); })
              : write_indices(op_.coop, args_, source, tokens);
      if (op_.coop.lane == 0) op_.count_received(source, tokens_here * int64_t{args_.hidden + scale_bytes});
      if (!args_.expand) return;
      copy_to_short_rows(op_.coop, scales, scale_bytes, table, tokens, args_.top_k,
                         [&](int token, int row) { return landing_.landed_scales(source, token, row); });
    });
    mover.complete_to(mover.puts());
  }

 private:
  JAX_EP_FN int stage_bytes() const { return align_up(wire_message_bytes(put_values_), 128); }

  Op& op_;
  const DispatchArgs& args_;
  const Landing landing_;
  const int message_values_, put_values_;
  RowStream<char, Apart<LaneTerms<char>, LaneTerms<char>>> stream_;
  RowWriter writer_;
};

// Only declared: the class that runs a kernel, by the kernel's arguments.
template <class T>
PlainDispatch<false> dispatch_of(const PlainDispatchArgs&);
template <class T>
PlainDispatch<false> dispatch_of(const FewDispatchArgs&);
template <class T>
PlainDispatch<true> dispatch_of(const GroupedDispatchArgs&);
template <class T>
Float8Dispatch<T> dispatch_of(const Float8DispatchArgs&);
template <class T>
Float8RowsDispatch<T> dispatch_of(const Float8RowsDispatchArgs&);

template <class T = NoFormat, class Args, class Dispatch = decltype(dispatch_of<T>(Args{}))>
JAX_EP_FN void run_kernel(const Comm& comm, const Args& kernel_args, const Coop& coop) {
  constexpr bool kGrouped = std::is_same_v<Args, GroupedDispatchArgs>;
  const DispatchArgs& args = kernel_args;
  Op op(comm, coop, kind_of(args));
  const Results<DispatchArgs> results(args, comm.size);
  op.poison(results);
  post_dispatch(op, args);
  if (kernel_args.by_assignments)
    RoutingByAssignments(op, args).run();
  else
    RoutingByCounts(op, args).run();
  op.wait_posted();
  const RoutingResults routed(op, args);
  Dispatch dispatch(op, args);
  if (op.ok() && !coop.sender.empty()) {
    const int per_ticket = kGrouped ? group_items(args.num_tokens, args.top_k, coop.sender.count) : 1;
    dispatch.push(RoutedTokens(op, args, routed, per_ticket));
  }
  if (!op.coop.receiver.empty()) dispatch.pad(routed.counts());
  if (routed.all_placed())
    dispatch.expand();
  else  // a peer that has not yet learned of the lack of room still pushes
    for_each_arrival(op, args.num_tokens, /*own=*/true, [](int, Range) {});
  op.finish(results);
}

using DispatchKernel =
    std::variant<FewDispatchArgs, GroupedDispatchArgs, PlainDispatchArgs, Float8DispatchArgs, Float8RowsDispatchArgs>;
inline DispatchKernel kernel_of(const DispatchArgs& args, int, int) {
  if (args.wire == Wire::float8) return Float8DispatchArgs{args};
  if (args.wire == Wire::float8_rows) return Float8RowsDispatchArgs{args};
  if (args.by_assignments) return FewDispatchArgs{args};
  if (takes_groups(args.num_tokens, args.top_k, row_bytes(args))) return GroupedDispatchArgs{args};
  return PlainDispatchArgs{args};
}

}  // namespace jax_ep
