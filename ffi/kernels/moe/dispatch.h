// dispatch: route, and every token to where it lands at the ranks that own its experts: straight into XLA's buffer, or,
// if it sets off before its row is known or is to be decoded, into a landing slot.
#pragma once

#include "kernels/moe/landing.h"
#include "kernels/moe/ready.h"
#include "kernels/moe/route.h"
#include "kernels/moe/route_few.h"
#include "kernels/moe/routed.h"
#include "kernels/moe/rows.h"
#include "rows/float8_rows.h"
#include "rows/wire.h"

namespace jax_ep {

// The rows here of a source's tokens.
JAX_EP_FN const int32_t* rows_from(const DispatchArgs& args, int source) {
  return args.rows + int64_t{source} * args.num_tokens * args.top_k;
}

// A token of this rank; null for -1.
template <class T>
JAX_EP_FN const char* token_at(const DispatchArgs& args, int token) {
  return token < 0 ? nullptr : args.tokens + int64_t{token} * args.hidden * sizeof(T);
}

// An address, as a term.
JAX_EP_FN Term<char> term(char* row) { return {row, 1.0f}; }

// Tokens travel as they are. This rank's own eager tokens do not travel.
class PlainDispatch {
 public:
  JAX_EP_FN PlainDispatch(Op& op, const DispatchArgs& args)
      : op_(op),
        args_(args),
        bytes_(int64_t{args.hidden} * size_of(args.dtype)),
        landing_(op, args, size_of(args.dtype)),
        mover_(op.coop) {}

  JAX_EP_FN void push(const RoutedTokens& tokens) {
    push_chunks(
        op_, mover_, tokens, args_.num_tokens, bytes_, args_.top_k,
        [&](int token) { return args_.tokens + token * bytes_; },
        [&](int token, int k) { return landing_.at_peer(token, k, landing_.packed(token, k)); }, [] {});
  }

  JAX_EP_FN void pad(const RowCounts& counts) {
    zero_padding(op_, args_.received, bytes_, counts, args_.capacity, args_.alignment);
  }

  JAX_EP_FN void expand() {
    if (const Part receiver = op_.coop.receiver; receiver.takes_part()) {
      op_.enter(Phase::expand);
      copy(op_.comm.rank, {receiver.index, args_.eager, receiver.count},
           [&](int token, int) { return args_.tokens + token * bytes_; });
    }
    for_each_arrival(op_, args_.num_tokens, /*own=*/false, [&](int source, Range tokens) {
      copy(source, {tokens.begin, tokens.end, 1},
           [&](int token, int row) { return landing_.here(source, token, row); });
    });
    mover_.complete_to(mover_.mark());
  }

  // As expand(), for a product that waits for rows, which are counted. This rank's own tokens are handed out, too, as a
  // CTA may begin late; those of them that are not eager were pushed into all of their rows.
  JAX_EP_FN void expand_counted(const DispatchDotArgs& args) {
    RowCounter counter(op_, args, mover_);
    const auto visit = [&](int source, Range tokens) {
      const bool own = source == op_.comm.rank;
      copy(source, {tokens.begin, own ? smaller(tokens.end, args_.eager) : tokens.end, 1},
           [&](int token, int row) { return own ? args_.tokens + token * bytes_ : landing_.here(source, token, row); });
      counter.after(source, tokens);
    };
    for_each_arrival(op_, args_.num_tokens, /*own=*/true, visit, [&] { counter.finish(); });
    counter.finish();
  }

 private:
  template <class From>
  JAX_EP_FN void copy(int source, Stride tokens, From from) {
    const int here =
        copy_to_rows(op_.coop, mover_, tokens, args_.received, bytes_, rows_from(args_, source), args_.top_k, from);
    if (op_.coop.lane == 0) op_.count_received(source, here * bytes_);
  }

  Op& op_;
  const DispatchArgs& args_;
  const int64_t bytes_;
  const Landing landing_;
  RowMover mover_;
};

// Tokens in float8, this rank's own too: encoded into their landing slots and decoded from there.
template <class T>
class EncodedDispatch {
 public:
  JAX_EP_FN EncodedDispatch(Op& op, const DispatchArgs& args)
      : op_(op),
        args_(args),
        landing_(op, args, sizeof(T)),
        stream_(op.coop, kWireStageBytes<T>, true, 2 * kWireStageBytes<T>),
        writer_(op.coop, kWireStageBytes<T>, true, 2) {}

  JAX_EP_FN void push(const RoutedTokens& tokens) {
    MessageStream<T, Encode<T>> encoder(op_.coop, args_.hidden, stream_, {writer_});
    const auto begin = [&](int token, auto packed) {
      const auto slots =
          line_up<char>(op_.coop, args_.top_k, [&](int k) { return term(landing_.at_owner(token, k, packed(k))); });
      encoder.begin(token_at<T>(args_, token), slots);
    };
    push_items(op_, tokens, args_.num_tokens, args_.top_k, landing_, encoder, writer_, begin);
  }

  JAX_EP_FN void pad(const RowCounts& counts) {
    zero_padding(op_, args_.received, row_bytes(), counts, args_.capacity, args_.alignment);
  }

  JAX_EP_FN void expand() {
    MessageStream<T, Decode<T>> decoder(op_.coop, args_.hidden, stream_, {writer_});
    for_each_arrival(op_, args_.num_tokens, /*own=*/true, [&](int source, Range tokens) {
      stream_.acquire();
      int here = 0;
      for (int token = tokens.begin; token < tokens.end; ++token) {
        const int32_t* table = rows_from(args_, source) + int64_t{token} * args_.top_k;
        const auto rows = line_up<char>(op_.coop, args_.top_k, [&](int k) {
          return term(table[k] < 0 ? nullptr : args_.received + table[k] * row_bytes());
        });
        if (rows.empty()) continue;
        decoder.begin(landing_.slot_here(source, token), rows);
        ++here;
      }
      if (op_.coop.lane == 0) op_.count_received(source, here * landing_.slot_bytes());
    });
    decoder.finish();
    writer_.complete_to(writer_.mark());
  }

 private:
  JAX_EP_FN int64_t row_bytes() const { return int64_t{args_.hidden} * static_cast<int>(sizeof(T)); }

  Op& op_;
  const DispatchArgs& args_;
  const Landing landing_;
  RowStream<char, Held<char>> stream_;
  RowWriter writer_;
};

// Tokens in float8 that stay so: encoded into values and scales where they land, this rank's own too.
template <class T>
class Float8Dispatch {
 public:
  JAX_EP_FN Float8Dispatch(Op& op, const DispatchArgs& args)
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
      Spot spot{};
      int found = -1;  // for which assignment: values and scales are asked for in turn
      const auto at = [&](int k) {
        if (k != found) spot = landing_.spot_at_owner(token, k, packed(k));
        found = k;
        return spot;
      };
      const auto values = line_up<char>(op_.coop, args_.top_k, [&](int k) { return term(at(k).values); });
      const auto scales = line_up<char>(op_.coop, args_.top_k, [&](int k) { return term(at(k).scales); });
      encoder.begin(token_at<T>(args_, token), apart(values, scales));
    };
    push_items(op_, tokens, args_.num_tokens, args_.top_k, landing_, encoder, writer_, begin);
  }

  JAX_EP_FN void pad(const RowCounts& counts) {
    zero_padding(op_, args_.received, args_.hidden, counts, args_.capacity, args_.alignment);
    zero_padding(op_, reinterpret_cast<char*>(args_.scales), scale_row_bytes(args_.hidden), counts, args_.capacity,
                 args_.alignment);
  }

  JAX_EP_FN void expand() {
    const int scale_bytes = scale_row_bytes(args_.hidden);
    auto* scales = reinterpret_cast<char*>(args_.scales);
    RowMover mover(op_.coop);
    for_each_arrival(op_, args_.num_tokens, /*own=*/true, [&](int source, Range tokens) {
      if (source == op_.comm.rank) tokens.end = smaller(tokens.end, args_.eager);  // later ones are in all their rows
      const int32_t* table = rows_from(args_, source);
      const int here = copy_to_rows(op_.coop, mover, {tokens.begin, tokens.end, 1}, args_.received, args_.hidden, table,
                                    args_.top_k, [&](int token, int row) { return landing_.here(source, token, row); });
      if (op_.coop.lane == 0) op_.count_received(source, here * int64_t{args_.hidden + scale_bytes});
      copy_to_short_rows(op_.coop, scales, scale_bytes, table, tokens, args_.top_k,
                         [&](int token, int row) { return landing_.scales_here(source, token, row); });
    });
    mover.complete_to(mover.mark());
  }

 private:
  JAX_EP_FN int stage_bytes() const { return align_up(wire_message_bytes(put_values_), 128); }

  Op& op_;
  const DispatchArgs& args_;
  const Landing landing_;
  const int message_values_, put_values_;
  RowStream<char, Apart<Held<char>, Held<char>>> stream_;
  RowWriter writer_;
};

// Once the rows of all tokens are known, and there is room for them, expand(dispatch) takes in what arrives.
template <class Dispatch, class Expand>
JAX_EP_FN void send_tokens(Op& op, const DispatchArgs& args, Expand expand) {
  const Routed routed(op, args);
  Dispatch dispatch(op, args);
  if (op.ok() && op.coop.sender.takes_part()) dispatch.push({op, args, routed});
  if (op.coop.receiver.takes_part()) dispatch.pad(routed.counts());
  if (routed.settled())
    expand(dispatch);
  else  // peers that learn of the lack of room later still push
    for_each_arrival(op, args.num_tokens, /*own=*/true, [](int, Range) {});
}

template <class Dispatch>
JAX_EP_FN void route_and_send(const Comm& comm, const DispatchArgs& args, const Coop& coop) {
  Op op(comm, coop, OpKind::dispatch);
  const Results<DispatchArgs> results(args, comm.size);
  op.poison(results);
  post_dispatch(op, args);
  if (args.few)
    FewRouter(op, args).route();
  else
    Router(op, args).route();
  op.wait_posted();
  send_tokens<Dispatch>(op, args, [](Dispatch& dispatch) { dispatch.expand(); });
  op.finish(results);
}

JAX_EP_FN void run_kernel(const Comm& comm, const PlainDispatchArgs& args, const Coop& coop) {
  route_and_send<PlainDispatch>(comm, args, coop);
}
template <class T>
JAX_EP_FN void run_kernel(const Comm& comm, const EncodedDispatchArgs& args, const Coop& coop) {
  route_and_send<EncodedDispatch<T>>(comm, args, coop);
}
template <class T>
JAX_EP_FN void run_kernel(const Comm& comm, const Float8DispatchArgs& args, const Coop& coop) {
  route_and_send<Float8Dispatch<T>>(comm, args, coop);
}

// The kernel of a dispatch: one for each way that tokens travel.
template <class Run>
auto choose_kernel(const DispatchArgs& args, Run run) {
  if (!args.wire_float8) return run(PlainDispatchArgs{args});
  return args.rows_float8 ? run(Float8DispatchArgs{args}) : run(EncodedDispatchArgs{args});
}

}  // namespace jax_ep
