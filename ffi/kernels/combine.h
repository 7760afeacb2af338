// combine: the expert's rank sums a token's rows in float32 and sends one row; the token's rank sums those in rank
// order. Its own share it adds in float32, unrounded.
#pragma once

#include "device/numeric.h"
#include "kernels/args.h"
#include "kernels/op.h"
#include "kernels/schedule.h"

namespace jax_ep {

// A lane's piece of a row, moved in 16-byte words where the rows allow it.
template <class T>
struct alignas(16) Piece {
  T values[kLaneValues];

  JAX_EP_FN void load(const T* from, int count, bool words) {
    if (words && count == kLaneValues) {
      *this = *reinterpret_cast<const Piece*>(from);
    } else {
      for (int i = 0; i < count; ++i) values[i] = from[i];
    }
  }
  JAX_EP_FN void store(T* to, int count, bool words) const {
    if (words && count == kLaneValues) {
      *reinterpret_cast<Piece*>(to) = *this;
    } else {
      for (int i = 0; i < count; ++i) to[i] = values[i];
    }
  }
};

// out = the sum of weight * row over terms(add), where terms calls add(row, weight) in a fixed order.
template <class T, class Terms>
JAX_EP_FN void sum_rows(const Team& team, int hidden, T* out, bool words, Terms terms) {
  for (int begin = team.lane * kLaneValues; begin < hidden; begin += Team::lanes * kLaneValues) {
    const int count = smaller(kLaneValues, hidden - begin);
    float total[kLaneValues] = {};
    Piece<T> piece{};
    terms([&](const T* row, float weight) {
      piece.load(row + begin, count, words);
      for (int i = 0; i < kLaneValues; ++i) total[i] += weight * to_float(piece.values[i]);
    });
    for (int i = 0; i < kLaneValues; ++i) from_float(total[i], &piece.values[i]);
    piece.store(out + begin, count, words);
  }
}

template <class T>
class Combine {
 public:
  JAX_EP_FN Combine(Op& op, const CombineArgs& args)
      : op_(op),
        args_(args),
        outputs_(reinterpret_cast<const T*>(args.outputs)),
        words_(in_words(args.outputs, args.landing, int64_t{args.hidden} * sizeof(T)) &&
               in_words(args.combined, args.combined, 0)) {}

  // Sums the rows of every token of every peer, and sends the sums and the scalars home, chunk by chunk.
  JAX_EP_FN void push() {
    const Place pusher = op_.team.pusher;
    if (pusher.index < 0) return;
    const Schedule schedule(args_.num_tokens);
    for (int chunk = 0; chunk < schedule.chunks; ++chunk) {
      const Range tokens = schedule.chunk(chunk);
      const int in_chunk = tokens.end - tokens.begin, all = op_.comm.size * in_chunk;
      for (int i = pusher.index; i < all && op_.may_push(); i += pusher.count) {
        const int home = (op_.comm.rank + 1 + i % op_.comm.size) % op_.comm.size;
        const int token = tokens.begin + i / op_.comm.size;
        if (home != op_.comm.rank) push_partial(home, token);
        if (args_.scalars) push_scalars(home, token);
      }
      op_.team.sync();
      op_.deliver(chunk);
    }
  }

  // For every token of this rank, the sum over ranks, in the order in which they arrive.
  JAX_EP_FN void reduce() {
    const Schedule schedule(args_.num_tokens);
    while (op_.ok()) {
      const int ticket = op_.take_ticket(), chunk = ticket / schedule.groups();
      if (chunk >= schedule.chunks) return;
      op_.wait_delivered(chunk);
      if (!op_.ok()) return;
      const Range tokens = schedule.group(chunk, ticket % schedule.groups());
      for (int token = tokens.begin; token < tokens.end; ++token) reduce(token);
    }
  }

 private:
  JAX_EP_FN int64_t table(int source, int token) const {
    return (int64_t{source} * args_.num_tokens + token) * args_.top_k;
  }

  JAX_EP_FN void reduce(int token) {
    const int32_t* targets = args_.targets + int64_t{token} * args_.top_k;
    T* out = reinterpret_cast<T*>(args_.combined) + int64_t{token} * args_.hidden;
    sum_rows<T>(op_.team, args_.hidden, out, words_, [&](auto add) {
      for (int rank = 0; rank < op_.comm.size; ++rank) {
        if (rank == op_.comm.rank)
          add_rows(rank, token, add);
        else if (sends(rank, targets))
          add(landed(reinterpret_cast<const T*>(args_.landing), rank, token), 1.0f);
      }
    });
    return_nothing(token, targets);
  }

  template <class Pointer>
  JAX_EP_FN Pointer* landed(Pointer* landing, int source, int token) const {
    return landing + (int64_t{source} * args_.num_tokens + token) * args_.hidden;
  }

  JAX_EP_FN bool sends(int rank, const int32_t* targets) const {
    for (int k = 0; k < args_.top_k; ++k)
      if (targets[k] >= 0 && targets[k] / args_.capacity == rank) return true;
    return false;
  }

  template <class Add>
  JAX_EP_FN void add_rows(int home, int token, Add add) const {
    const int64_t at = table(home, token);
    for (int k = 0; k < args_.top_k; ++k)
      if (args_.rows[at + k] >= 0)
        add(outputs_ + int64_t{args_.rows[at + k]} * args_.hidden, args_.weights ? args_.weights[at + k] : 1.0f);
  }

  JAX_EP_FN void push_partial(int home, int token) {
    bool any = false;
    for (int k = 0; k < args_.top_k; ++k) any |= args_.rows[table(home, token) + k] >= 0;
    if (!any) return;
    T* there = landed(static_cast<T*>(op_.mail_from(home)->buffers[0]), op_.comm.rank, token);
    sum_rows<T>(op_.team, args_.hidden, there, words_, [&](auto add) { add_rows(home, token, add); });
  }

  JAX_EP_FN void push_scalars(int home, int token) {
    float* there = static_cast<float*>(op_.mail_from(home)->buffers[1]) + int64_t{token} * args_.top_k;
    const int64_t at = table(home, token);
    for (int k = op_.team.lane; k < args_.top_k; k += Team::lanes)
      if (args_.rows[at + k] >= 0) there[k] = args_.scalars[at + k];
  }

  // No rank sends a scalar for an assignment without a row.
  JAX_EP_FN void return_nothing(int token, const int32_t* targets) {
    if (!args_.returned) return;
    for (int k = op_.team.lane; k < args_.top_k; k += Team::lanes)
      if (targets[k] < 0) args_.returned[int64_t{token} * args_.top_k + k] = 0.0f;
  }

  Op& op_;
  const CombineArgs& args_;
  const T* outputs_;
  const bool words_;
};

template <class T>
JAX_EP_FN void run_kernel(const Comm& comm, const CombineArgs& args, const Team& team) {
  Op op(comm, team, OpKind::combine);
  const int64_t row = int64_t{args.hidden} * sizeof(T);
  const Buffer results[] = {{args.combined, args.num_tokens * row},
                            {args.returned, args.returned ? int64_t{args.num_tokens} * args.top_k * 4 : 0}};
  op.poison(results);
  op.post(args.landing, args.returned);
  op.wait_posted();
  Combine<T> combine(op, args);
  combine.push();
  combine.reduce();
  op.finish(results);
}

}  // namespace jax_ep
