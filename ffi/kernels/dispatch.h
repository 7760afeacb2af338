// dispatch: route, then every token straight into XLA's buffer at the ranks that own its experts. Few tokens do both at
// once.
#pragma once

#include "kernels/dispatch_landed.h"
#include "kernels/route.h"
#include "kernels/rows.h"
#include "kernels/wire.h"

namespace jax_ep {

// Tokens as they are: pushed into their first row at every owner, expanded there.
template <class T>
JAX_EP_FN void dispatch_plain(Op& op, const DispatchArgs& args) {
  const int64_t bytes = int64_t{args.hidden} * sizeof(T);
  RowMover mover(op.team);
  const RowSink rows(op, args.targets, args.top_k, args.capacity);
  const auto source = [&](int token) { return args.tokens + token * bytes; };
  const auto sink = [&](int token, int k) { return rows.row(token, k, bytes); };
  push_chunks(op, mover, args.num_tokens, bytes, args.top_k, source, sink);
  zero_padding(op, args.received, bytes, args.counts, args.num_experts / op.comm.size, args.capacity, args.alignment);
  expand_rows(op, mover, args.received, bytes, args.rows, args.num_tokens, args.top_k);
}

// Tokens in float8: encoded into a landing slot at every owner, this rank's included, and decoded from there.
template <class T>
class EncodedDispatch {
 public:
  JAX_EP_FN EncodedDispatch(Op& op, const DispatchArgs& args)
      : op_(op),
        args_(args),
        sink_(op, args.targets, args.top_k, args.capacity),
        stream_(op.team, kWireStageBytes<T>, true, kWireStageBytes<T>),
        writer_(op.team, kWireStageBytes<T>, true) {}

  JAX_EP_FN void push() {
    if (!op_.ok() || op_.team.pusher.index < 0) return;
    op_.enter(Phase::send);
    MessageStream<T, Encode<T>> encoder(op_.team, args_.hidden, stream_, {writer_});
    push_items(op_, args_.num_tokens, args_.top_k, sink_, encoder, writer_, [&](int token, auto packed) {
      const auto slots =
          line_up<char>(op_.team, args_.top_k, [&](int k) { return slot_at_owner(token, k, packed(k)); });
      encoder.begin(args_.tokens + int64_t{token} * args_.hidden * sizeof(T), slots);
    });
  }

  JAX_EP_FN void expand() {
    MessageStream<T, Decode<T>> decoder(op_.team, args_.hidden, stream_, {writer_});
    for_each_arrival(op_, args_.num_tokens, /*own=*/true, [&](int source, Range tokens) {
      stream_.acquire();
      for (int token = tokens.begin; token < tokens.end; ++token) {
        const int32_t* table = args_.rows + (int64_t{source} * args_.num_tokens + token) * args_.top_k;
        const auto rows = line_up<char>(op_.team, args_.top_k, [&](int k) { return row_of(table[k]); });
        if (!rows.empty()) decoder.begin(args_.landing + slot(source, token), rows);
      }
    });
    decoder.finish();
    writer_.complete_to(writer_.mark());
  }

 private:
  JAX_EP_FN int64_t slot(int source, int token) const {
    return (int64_t{source} * args_.num_tokens + token) * wire_bytes(args_.hidden);
  }
  JAX_EP_FN Term<char> slot_at_owner(int token, int k, int packed) const {
    char* landing = sink_.first(token, k, packed);
    return {landing ? landing + slot(op_.comm.rank, token) : nullptr, 1.0f};
  }
  JAX_EP_FN Term<char> row_of(int row) const {
    return {row < 0 ? nullptr : args_.received + row * int64_t{args_.hidden} * static_cast<int>(sizeof(T)), 1.0f};
  }

  Op& op_;
  const DispatchArgs& args_;
  const RowSink sink_;
  RowStream<char, Held<char>> stream_;
  RowWriter writer_;
};

template <class T>
JAX_EP_FN void dispatch_encoded(Op& op, const DispatchArgs& args) {
  EncodedDispatch<T> dispatch(op, args);
  dispatch.push();
  zero_padding(op, args.received, int64_t{args.hidden} * sizeof(T), args.counts, args.num_experts / op.comm.size,
               args.capacity, args.alignment);
  dispatch.expand();
}

// Tokens in float8 that stay so: encoded into their first row at every owner, values and scales, and expanded there.
template <class T>
class Float8Dispatch {
 public:
  JAX_EP_FN Float8Dispatch(Op& op, const DispatchArgs& args)
      : op_(op),
        args_(args),
        values_(op, args.targets, args.top_k, args.capacity),
        scales_(op, args.targets, args.top_k, args.capacity, 3),
        stage_bytes_(apart_stage_bytes<T>(op.team, args.hidden)),
        stream_(op.team, kWireStageBytes<T>, true, stage_bytes_),
        writer_(op.team, stage_bytes_, true) {}

  JAX_EP_FN void push() {
    if (!op_.ok() || op_.team.pusher.index < 0) return;
    op_.enter(Phase::send);
    MessageStream<T, EncodeApart<T>> encoder(
        op_.team, args_.hidden, stream_,
        {writer_, scale_bytes() % 16 == 0, apart_put_values(stage_bytes_, args_.hidden)});
    push_items(op_, args_.num_tokens, args_.top_k, values_, encoder, writer_, [&](int token, auto packed) {
      const auto values = line_up<char>(op_.team, args_.top_k, [&](int k) {
        return Term<char>{values_.row(token, k, args_.hidden, packed(k)), 1.0f};
      });
      const auto scales = line_up<char>(op_.team, args_.top_k, [&](int k) {
        return Term<char>{scales_.row(token, k, scale_bytes(), packed(k)), 1.0f};
      });
      encoder.begin(args_.tokens + int64_t{token} * args_.hidden * sizeof(T), apart(values, scales));
    });
  }

  JAX_EP_FN void expand() {
    RowMover mover(op_.team);
    for_each_arrival(op_, args_.num_tokens, /*own=*/false, [&](int source, Range tokens) {
      const int32_t* table = args_.rows + int64_t{source} * args_.num_tokens * args_.top_k;
      auto* scales = reinterpret_cast<char*>(args_.scales);
      expand_group(op_.team, mover, args_.received, args_.hidden, table, tokens, args_.top_k);
      expand_short_rows(op_.team, scales, scale_bytes(), table, tokens, args_.top_k);
    });
    mover.complete_to(mover.mark());
  }

 private:
  JAX_EP_FN int scale_bytes() const { return args_.hidden / kScaleBlock * 4; }

  Op& op_;
  const DispatchArgs& args_;
  const RowSink values_, scales_;
  const int stage_bytes_;
  RowStream<char, Apart<Held<char>, Held<char>>> stream_;
  RowWriter writer_;
};

template <class T>
JAX_EP_FN void dispatch_float8(Op& op, const DispatchArgs& args) {
  Float8Dispatch<T> dispatch(op, args);
  dispatch.push();
  const int local = args.num_experts / op.comm.size;
  zero_padding(op, args.received, args.hidden, args.counts, local, args.capacity, args.alignment);
  zero_padding(op, reinterpret_cast<char*>(args.scales), args.hidden / kScaleBlock * 4, args.counts, local,
               args.capacity, args.alignment);
  dispatch.expand();
}

template <class T>
JAX_EP_FN void run_kernel(const Comm& comm, const DispatchArgs& args, const Team& team) {
  Op op(comm, team, OpKind::dispatch);
  const int64_t local = args.num_experts / comm.size;
  const int64_t table = int64_t{comm.size} * args.num_tokens * args.top_k * 4;
  const int64_t row = args.hidden * (args.rows_float8 ? 1 : static_cast<int64_t>(sizeof(T)));
  const int64_t scale_row = args.rows_float8 ? args.hidden / kScaleBlock * 4 : 0;
  const Buffer results[] = {{args.received, args.capacity * row},
                            {args.scales, args.capacity * scale_row},
                            {args.group_sizes, local * 4, Undelivered::size},
                            {args.targets, int64_t{args.num_tokens} * args.top_k * 4, Undelivered::target},
                            {args.rows, table},
                            {args.arrived, table},
                            {args.counts, comm.size * local * 4, Undelivered::size},
                            {args.dropped, 4, Undelivered::size},
                            {args.invalid, 4, Undelivered::size}};
  op.poison(results);
  Router router(op, args);
  if (args.few) {
    dispatch_landed<T>(op, args, router);
  } else if (router.route(args.wire_float8 && !args.rows_float8 ? args.landing : args.received)) {
    if (args.rows_float8)
      dispatch_float8<T>(op, args);
    else if (args.wire_float8)
      dispatch_encoded<T>(op, args);
    else
      dispatch_plain<T>(op, args);
  }
  op.finish(results);
}

}  // namespace jax_ep
