// dispatch: route, then every token straight into XLA's buffer at the ranks that own its experts.
#pragma once

#include "kernels/route.h"
#include "kernels/rows.h"
#include "kernels/wire.h"

namespace jax_ep {

template <class T>
class Dispatch {
 public:
  JAX_EP_FN Dispatch(Op& op, const DispatchArgs& args)
      : op_(op),
        args_(args),
        row_bytes_(int64_t{args.hidden} * sizeof(T)),
        slot_bytes_(wire_bytes(args.hidden)),
        sink_(op, args.targets, args.top_k, args.capacity),
        mover_(op.team) {}

  JAX_EP_FN void push() {
    const auto source = [&](int token) { return args_.tokens + token * row_bytes_; };
    const auto sink = [&](int token, int k) { return sink_.row(token, k, row_bytes_); };
    push_chunks(op_, mover_, args_.num_tokens, row_bytes_, args_.top_k, source, sink);
  }

  // In float8: encodes each token into this rank's own landing slot, and pushes the slot.
  JAX_EP_FN void push_encoded() {
    const auto source = [&](int token) -> const char* {
      char* own = args_.landing + slot(op_.comm.rank, token);
      encode_row(op_.team, reinterpret_cast<const T*>(args_.tokens + token * row_bytes_), args_.hidden, own);
      mover_.publish();
      return own;
    };
    const auto sink = [&](int token, int k) -> char* {
      const RowSink::Sink found = sink_.sink(token, k);
      return found.base && found.target.owner != op_.comm.rank ? found.base + slot(op_.comm.rank, token) : nullptr;
    };
    push_chunks(op_, mover_, args_.num_tokens, slot_bytes_, args_.top_k, source, sink);
  }

  JAX_EP_FN void expand() {
    expand_rows(op_, mover_, args_.received, row_bytes_, args_.rows, args_.num_tokens, args_.top_k);
  }

  // Decodes what landed into all rows of every token.
  JAX_EP_FN void expand_encoded() {
    T* received = reinterpret_cast<T*>(args_.received);
    for_each_arrival(op_, args_.num_tokens, /*own=*/true, [&](int source, Range tokens) {
      for (int token = tokens.begin; token < tokens.end; ++token) {
        const int32_t* rows = args_.rows + (int64_t{source} * args_.num_tokens + token) * args_.top_k;
        const auto row_of = [&](int k) { return rows[k] < 0 ? nullptr : received + int64_t{rows[k]} * args_.hidden; };
        decode_row<T>(op_.team, args_.landing + slot(source, token), args_.hidden, args_.top_k, row_of);
      }
    });
  }

 private:
  // Where a token in float8 lands at every owner.
  JAX_EP_FN int64_t slot(int source, int token) const {
    return (int64_t{source} * args_.num_tokens + token) * slot_bytes_;
  }

  Op& op_;
  const DispatchArgs& args_;
  const int64_t row_bytes_, slot_bytes_;
  const RowSink sink_;
  RowMover mover_;
};

template <class T>
JAX_EP_FN void run_kernel(const Comm& comm, const DispatchArgs& args, const Team& team) {
  Op op(comm, team, OpKind::dispatch);
  const int local = args.num_experts / comm.size;
  const int64_t row = int64_t{args.hidden} * sizeof(T);
  const int64_t table = int64_t{comm.size} * args.num_tokens * args.top_k * 4;
  const Buffer results[] = {{args.received, args.capacity * row},
                            {args.group_sizes, int64_t{local} * 4, Undelivered::size},
                            {args.targets, int64_t{args.num_tokens} * args.top_k * 4, Undelivered::target},
                            {args.rows, table},
                            {args.arrived, table},
                            {args.counts, int64_t{comm.size} * local * 4, Undelivered::size},
                            {args.dropped, 4, Undelivered::size},
                            {args.invalid, 4, Undelivered::size}};
  op.poison(results);
  if (Router(op, args).route(args.wire_float8 ? args.landing : args.received)) {
    Dispatch<T> dispatch(op, args);
    args.wire_float8 ? dispatch.push_encoded() : dispatch.push();
    zero_padding(op, args.received, row, args.counts, local, args.capacity, args.alignment);
    args.wire_float8 ? dispatch.expand_encoded() : dispatch.expand();
  }
  op.finish(results);
}

}  // namespace jax_ep
