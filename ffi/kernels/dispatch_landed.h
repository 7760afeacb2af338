// dispatch of few tokens, whose routing takes as long as their way: they set off at once, each into a slot of its own
// at the owners of its experts, while the ranks find out which rows are theirs; then they go there.
#pragma once

#include "kernels/announcer.h"
#include "kernels/route.h"
#include "kernels/rows.h"
#include "kernels/wire.h"

namespace jax_ep {

// Bytes of the slot in which a token lands: messages in float8, values in float8 and behind them their scales, or
// values as they are. 0: tokens do not land, as many do only where they are decoded.
JAX_EP_CONSTANT_FN int64_t landing_slot_bytes(int num_tokens, int hidden, int value_bytes, bool wire_float8,
                                              bool rows_float8) {
  if (wire_float8 && !rows_float8) return wire_bytes(hidden);
  if (num_tokens > kFewTokens) return 0;
  return rows_float8 ? (int64_t{hidden} + hidden / kScaleBlock * 4 + 15) / 16 * 16 : int64_t{hidden} * value_bytes;
}

// A slot for every token of every rank, at each rank.
class LandingSlots {
 public:
  JAX_EP_FN LandingSlots(const Op& op, const DispatchArgs& args, int value_bytes)
      : op_(op),
        args_(args),
        slot_bytes_(landing_slot_bytes(args.num_tokens, args.hidden, value_bytes, args.wire_float8, args.rows_float8)),
        by_local_(args.num_experts / op.comm.size),
        bases_(op, 0) {}

  // What push_items asks for early: the expert of the k-th assignment of a token of this rank, -1 behind the last.
  JAX_EP_FN int packed(int token, int k) const {
    return k < args_.top_k ? args_.expert_ids[int64_t{token} * args_.top_k + k] : -1;
  }
  // The slot at its owner, if it is the token's first there. All lanes ask together, each for its own k.
  JAX_EP_FN char* at_owner(int token, int k, int expert) const {
    const int owner = owner_of(expert);
    const auto owner_before = [&](int j) { return owner_of(packed(token, j)); };
    const bool first = first_at_owner(op_.team, args_.top_k, k, owner, owner_before);
    char* base = bases_.of(owner);
    return first && base ? base + offset(op_.comm.rank, token) : nullptr;
  }
  JAX_EP_FN char* at_peer(int token, int k) const {
    const int expert = packed(token, k);
    char* slot = at_owner(token, k, expert);
    return owner_of(expert) == op_.comm.rank ? nullptr : slot;
  }
  JAX_EP_FN const char* here(int source, int token) const { return args_.landing + offset(source, token); }

  // The rows of a token here.
  JAX_EP_FN const int32_t* rows(int source, int token) const {
    return args_.rows + (int64_t{source} * args_.num_tokens + token) * args_.top_k;
  }

 private:
  JAX_EP_FN int64_t offset(int source, int token) const {
    return (int64_t{source} * args_.num_tokens + token) * slot_bytes_;
  }
  JAX_EP_FN int owner_of(int expert) const {
    return expert >= 0 && expert < args_.num_experts ? by_local_.quotient(expert) : -1;
  }

  const Op& op_;
  const DispatchArgs& args_;
  const int64_t slot_bytes_;
  const Divider by_local_;
  const PeerBuffer bases_;
};

// Copies tokens to their rows here, from where source_of(token) says.
template <class Mover, class Next, class SourceOf>
JAX_EP_FN void copy_to_rows(const Team& team, Mover& mover, Next next, char* received, int64_t bytes,
                            const int32_t* table, int top_k, SourceOf source_of) {
  const auto source = [&](int token) -> const char* {
    return rows_of_token(team, table + int64_t{token} * top_k, top_k).count > 0 ? source_of(token) : nullptr;
  };
  const auto sink = [&](int token, int k) -> char* {
    const int row = k < top_k ? table[int64_t{token} * top_k + k] : -1;
    return row < 0 ? nullptr : received + row * bytes;
  };
  mover.move(next, bytes, top_k, source, sink, [](int, auto&) {});
}

// Tokens as they are. This rank's own do not travel.
template <class T>
class PlainLanding {
 public:
  JAX_EP_FN PlainLanding(Op& op, const DispatchArgs& args)
      : op_(op), args_(args), bytes_(int64_t{args.hidden} * sizeof(T)), slots_(op, args, sizeof(T)), mover_(op.team) {}

  JAX_EP_FN void push() {
    const auto source = [&](int token) { return args_.tokens + token * bytes_; };
    const auto sink = [&](int token, int k) { return slots_.at_peer(token, k); };
    push_chunks(op_, mover_, args_.num_tokens, bytes_, args_.top_k, source, sink, /*late=*/true);
  }

  JAX_EP_FN void expand() {
    const int local = args_.num_experts / op_.comm.size, me = op_.comm.rank;
    zero_padding(op_, args_.received, bytes_, args_.counts, local, args_.capacity, args_.alignment);
    if (const Place filler = op_.team.filler; op_.ok() && filler.index >= 0) {
      op_.enter(Phase::expand);
      copy(me, {filler.index, args_.num_tokens, filler.count},
           [&](int token) { return args_.tokens + token * bytes_; });
    }
    for_each_arrival(op_, args_.num_tokens, /*own=*/false, [&](int source, Range tokens) {
      copy(source, {tokens.begin, tokens.end, 1}, [&](int token) { return slots_.here(source, token); });
    });
    mover_.complete_to(mover_.mark());
  }

 private:
  template <class SourceOf>
  JAX_EP_FN void copy(int source, Stride tokens, SourceOf source_of) {
    copy_to_rows(
        op_.team, mover_, [&] { return tokens.next(); }, args_.received, bytes_, slots_.rows(source, 0), args_.top_k,
        source_of);
  }

  Op& op_;
  const DispatchArgs& args_;
  const int64_t bytes_;
  const LandingSlots slots_;
  RowMover mover_;
};

// Tokens in float8, this rank's own too: encoded into their slots and decoded from there.
template <class T>
class EncodedLanding {
 public:
  JAX_EP_FN EncodedLanding(Op& op, const DispatchArgs& args)
      : op_(op),
        args_(args),
        slots_(op, args, sizeof(T)),
        stream_(op.team, kWireStageBytes<T>, true, kWireStageBytes<T>),
        writer_(op.team, kWireStageBytes<T>, true) {}

  JAX_EP_FN void push() {
    if (!op_.ok() || op_.team.pusher.index < 0) return;
    op_.enter(Phase::send);
    MessageStream<T, Encode<T>> encoder(op_.team, args_.hidden, stream_, {writer_});
    const auto begin = [&](int token, auto expert) {
      const auto slots =
          line_up<char>(op_.team, args_.top_k, [&](int k) { return term(slots_.at_owner(token, k, expert(k))); });
      encoder.begin(args_.tokens + int64_t{token} * args_.hidden * sizeof(T), slots);
    };
    push_items(op_, args_.num_tokens, args_.top_k, slots_, encoder, writer_, begin, /*late=*/true);
  }

  JAX_EP_FN void expand() {
    const int64_t bytes = int64_t{args_.hidden} * sizeof(T);
    const int local = args_.num_experts / op_.comm.size;
    zero_padding(op_, args_.received, bytes, args_.counts, local, args_.capacity, args_.alignment);
    MessageStream<T, Decode<T>> decoder(op_.team, args_.hidden, stream_, {writer_});
    for_each_arrival(op_, args_.num_tokens, /*own=*/true, [&](int source, Range tokens) {
      stream_.acquire();
      for (int token = tokens.begin; token < tokens.end; ++token) {
        const int32_t* table = slots_.rows(source, token);
        const auto rows = line_up<char>(op_.team, args_.top_k, [&](int k) {
          return term(table[k] < 0 ? nullptr : args_.received + table[k] * bytes);
        });
        if (!rows.empty()) decoder.begin(slots_.here(source, token), rows);
      }
    });
    decoder.finish();
    writer_.complete_to(writer_.mark());
  }

 private:
  static JAX_EP_FN Term<char> term(char* row) { return {row, 1.0f}; }

  Op& op_;
  const DispatchArgs& args_;
  const LandingSlots slots_;
  RowStream<char, Held<char>> stream_;
  RowWriter writer_;
};

// Tokens in float8 that stay so, this rank's own too: encoded into their slots, the values and behind them the scales.
template <class T>
class Float8Landing {
 public:
  JAX_EP_FN Float8Landing(Op& op, const DispatchArgs& args)
      : op_(op),
        args_(args),
        scale_bytes_(args.hidden / kScaleBlock * 4),
        slots_(op, args, sizeof(T)),
        stage_bytes_(apart_stage_bytes<T>(op.team, args.hidden)),
        stream_(op.team, kWireStageBytes<T>, true, stage_bytes_),
        writer_(op.team, stage_bytes_, true) {}

  JAX_EP_FN void push() {
    if (!op_.ok() || op_.team.pusher.index < 0) return;
    op_.enter(Phase::send);
    const int at_once = apart_put_values(stage_bytes_, args_.hidden);
    MessageStream<T, EncodeApart<T>> encoder(op_.team, args_.hidden, stream_,
                                             {writer_, scale_bytes_ % 16 == 0, at_once});
    const auto begin = [&](int token, auto expert) {
      const auto slots_with = [&](int offset) {
        return line_up<char>(op_.team, args_.top_k, [this, token, expert, offset](int k) {
          char* slot = slots_.at_owner(token, k, expert(k));
          return Term<char>{slot ? slot + offset : nullptr, 1.0f};
        });
      };
      encoder.begin(args_.tokens + int64_t{token} * args_.hidden * sizeof(T),
                    apart(slots_with(0), slots_with(args_.hidden)));
    };
    push_items(op_, args_.num_tokens, args_.top_k, slots_, encoder, writer_, begin, /*late=*/true);
  }

  JAX_EP_FN void expand() {
    const int local = args_.num_experts / op_.comm.size;
    auto* scales = reinterpret_cast<char*>(args_.scales);
    zero_padding(op_, args_.received, args_.hidden, args_.counts, local, args_.capacity, args_.alignment);
    zero_padding(op_, scales, scale_bytes_, args_.counts, local, args_.capacity, args_.alignment);
    RowMover mover(op_.team);
    for_each_arrival(op_, args_.num_tokens, /*own=*/true, [&](int source, Range tokens) {
      const int32_t* table = slots_.rows(source, 0);
      Stride all{tokens.begin, tokens.end, 1};
      copy_to_rows(
          op_.team, mover, [&] { return all.next(); }, args_.received, args_.hidden, table, args_.top_k,
          [&](int token) { return slots_.here(source, token); });
      for (int i = tokens.begin * args_.top_k + op_.team.lane; i < tokens.end * args_.top_k; i += Team::lanes)
        if (const int row = table[i]; row >= 0)
          copy_alone(scales + int64_t{row} * scale_bytes_, slots_.here(source, i / args_.top_k) + args_.hidden,
                     scale_bytes_);
    });
    mover.complete_to(mover.mark());
  }

 private:
  Op& op_;
  const DispatchArgs& args_;
  const int scale_bytes_;
  const LandingSlots slots_;
  const int stage_bytes_;
  RowStream<char, Apart<Held<char>, Held<char>>> stream_;
  RowWriter writer_;
};

template <class Landing>
JAX_EP_FN void land(Op& op, const DispatchArgs& args, Router& router) {
  Landing landing(op, args);
  landing.push();
  if (router.settled_everywhere())
    landing.expand();
  else  // peers that learn of the lack of room later still push
    for_each_arrival(op, args.num_tokens, /*own=*/true, [](int, Range) {});
}

template <class T>
JAX_EP_FN void dispatch_landed(Op& op, const DispatchArgs& args, Router& router) {
  op.post_by(op.team.count - 1, args.landing, args.rows, args.arrived);  // by a team that has no part in routing
  router.route_beside();
  op.wait_posted();
  if (args.rows_float8)
    land<Float8Landing<T>>(op, args, router);
  else if (args.wire_float8)
    land<EncodedLanding<T>>(op, args, router);
  else
    land<PlainLanding<T>>(op, args, router);
}

}  // namespace jax_ep
