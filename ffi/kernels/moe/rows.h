// Moving rows along a routing: each token once per rank, its further rows there by the receiver.
#pragma once

#include "comm/op.h"
#include "comm/push.h"
#include "kernels/moe/schedule.h"
#include "rows/movers.h"

namespace jax_ep {

// Whether no assignment of a token before the k-th has the same owner. All lanes ask together, each for its own k.
template <class OwnerOf>
JAX_EP_FN bool first_at_owner(const Team& team, int top_k, int k, int owner, OwnerOf owner_of) {
  if (Team::lanes > 1 && top_k <= Team::lanes) return team.match(owner).below == 0;
  for (int j = 0; j < k && k < top_k; ++j)
    if (owner_of(j) == owner) return false;
  return true;
}

// Where the k-th assignment of a token is to be written: its row at the owner, if it is the token's first there or if
// the owner is this rank. All lanes ask together, each for its own k; null beyond the last.
class RowSink {
 public:
  // The rows are those of the buffer with this index in the mail.
  JAX_EP_FN RowSink(const Op& op, const int32_t* targets, int top_k, int capacity, int buffer = 0)
      : op_(op), targets_(targets), top_k_(top_k), capacity_(capacity), by_capacity_(capacity), bases_(op, buffer) {}

  JAX_EP_FN char* row(int token, int k, int64_t bytes) const { return row(token, k, bytes, packed(token, k)); }

  // The same where the target was asked for before.
  JAX_EP_FN int packed(int token, int k) const { return k < top_k_ ? targets_[int64_t{token} * top_k_ + k] : -1; }
  JAX_EP_FN char* row(int token, int k, int64_t bytes, int packed) const {
    return row_at(target(token, k, packed), bytes);
  }
  // The same in two steps, of which the first serves for other buffers too.
  JAX_EP_FN Target target(int token, int k, int packed) const {
    const Target target = unpack(packed);
    const bool first =
        first_at_owner(op_.team, top_k_, k, target.owner, [&](int j) { return unpack(this->packed(token, j)).owner; });
    return first || target.owner == op_.comm.rank ? target : Target{-1, -1};
  }
  JAX_EP_FN char* row_at(Target target, int64_t bytes) const {
    char* base = bases_.of(target.owner);
    return base ? base + target.row * bytes : nullptr;
  }

 private:
  JAX_EP_FN Target unpack(int packed) const {
    return packed < 0 ? Target{-1, -1} : unpack_target(packed, capacity_, by_capacity_);
  }

  const Op& op_;
  const int32_t* const targets_;
  const int top_k_, capacity_;
  const Divider by_capacity_;
  const PeerBuffer bases_;
};

// Pushes the tokens that items.next() hands out, until it gives -1, and announces their chunks; before the last,
// settle() is called.
template <class Items, class Source, class Sink, class Settle>
JAX_EP_FN void push_chunks(Op& op, RowMover& mover, Items items, int num_tokens, int64_t bytes, int fanout,
                           Source source, Sink sink, Settle settle) {
  op.enter(Phase::send);
  const Schedule schedule(num_tokens);
  Announcer announcer(op, schedule);
  bool may_push = op.may_push();
  const auto checked = [&](int token) -> const char* {
    if (!may_push) return nullptr;
    may_push = op.may_push();  // for the next row: the answer comes while this one moves
    return source(token);
  };
  const auto next = [&] { return items.next(); };
  const auto after = [&](int token, auto& rows) { announcer.after(token, rows); };
  mover.move(next, bytes, fanout, checked, sink, after);
  settle();
  announcer.finish(mover);
}

// The same one by one: begin(token, packed_of) starts to encode one, and with that the one before is put. What
// sink.packed(token, k) knows of the next, and whether it may be pushed, are asked for before that, so that nobody
// waits for them.
template <class Items, class Sink, class Encoder, class Begin>
JAX_EP_FN void push_items(Op& op, Items items, int num_tokens, int top_k, const Sink& sink, Encoder& encoder,
                          RowWriter& writer, Begin begin) {
  op.enter(Phase::send);
  const Schedule schedule(num_tokens);
  Announcer announcer(op, schedule);
  const auto ask = [&](int token) { return token < 0 ? -1 : sink.packed(token, op.team.lane); };
  uint64_t raised = op.ask_abort();
  int token = items.next(), mine = ask(token);
  while (token >= 0 && !raised) {
    const int next = items.next(), nexts = ask(next);
    raised = op.ask_abort();
    begin(token, [&](int k) { return k == op.team.lane || op.team.lane >= top_k ? mine : sink.packed(token, k); });
    announcer.begun(token, writer);
    token = next;
    mine = nexts;
  }
  if (!raised)
    encoder.finish();
  else
    encoder.drop();
  announcer.finish(writer);
}

// Takes groups of tokens in the order in which they arrive, until none are left: visit(source, tokens) once they are
// here. Somebody waits for every chunk of every peer, and of this rank too if `own`.
template <class Visit>
JAX_EP_FN void for_each_arrival(Op& op, int num_tokens, bool own, Visit visit) {
  const int sources = op.comm.size - (own ? 0 : 1);
  const Schedule schedule(num_tokens, sources, op.team.count);
  const int per_chunk = sources * schedule.groups();
  int latest = -1;    // chunk
  uint64_t here = 0;  // a bit per source of which it is here
  for (uint64_t asked = op.ask_for_ticket(); op.ok();) {
    const int ticket = op.take_ticket(asked);
    if (ticket >= schedule.chunks * per_chunk) return;
    asked = op.ask_for_ticket();
    const int chunk = ticket / per_chunk, group = ticket % per_chunk / sources;
    const int source = (op.comm.rank + 1 + ticket % sources) % op.comm.size;
    if (chunk != latest) here = 0;
    latest = chunk;
    if (!(here >> source & 1)) {  // waited for once
      op.wait_delivered(source, chunk);
      if (!op.ok()) return;
      op.enter(Phase::expand);
      here |= uint64_t{1} << source;
    }
    visit(source, schedule.group(chunk, group));
  }
}

// The rows of a token here: the first, and how many there are.
struct TokenRows {
  int first, count;
};
template <class RowAt>
JAX_EP_FN TokenRows rows_of_token(const Team& team, int top_k, RowAt row_at) {
  TokenRows found{-1, 0};
  for (int begin = 0; begin < top_k; begin += Team::lanes) {
    const int row = begin + team.lane < top_k ? row_at(begin + team.lane) : -1;
    const uint64_t present = team.ballot(row >= 0);
    if (found.first < 0 && present) found.first = team.from_lane(row, lowest_bit(present));
    found.count += count_bits(present);
  }
  return found;
}

// Copies each token from where it has landed, from(token, row), to its rows, of which `row` is the first: it may have
// landed there. `table` has top_k rows for each, which `valid` is asked for: a negative row is none. Returns how many
// tokens have a row.
template <class Mover, class From, class Valid>
JAX_EP_FN int copy_to_rows(const Team& team, Mover& mover, Stride tokens, char* received, int64_t bytes,
                           const int32_t* table, int top_k, From from, Valid valid) {
  const auto row_at = [&](int token, int k) { return valid(table[int64_t{token} * top_k + k]); };
  int filled = -1;  // the row in which the token has landed whose source was asked for last
  int here = 0;
  const auto source = [&](int token) -> const char* {
    const TokenRows found = rows_of_token(team, top_k, [&](int k) { return row_at(token, k); });
    const char* landed = from(token, found.first);
    here += found.count > 0;
    filled = landed == received + found.first * bytes ? found.first : -1;
    return found.count > (filled < 0 ? 0 : 1) ? landed : nullptr;
  };
  const auto sink = [&](int token, int k) -> char* {
    const int row = k < top_k ? row_at(token, k) : -1;
    return row >= 0 && row != filled ? received + row * bytes : nullptr;
  };
  mover.move([&] { return tokens.next(); }, bytes, top_k, source, sink, [](int, auto&) {});
  return here;
}
template <class Mover, class From>
JAX_EP_FN int copy_to_rows(const Team& team, Mover& mover, Stride tokens, char* received, int64_t bytes,
                           const int32_t* table, int top_k, From from) {
  return copy_to_rows(team, mover, tokens, received, bytes, table, top_k, from, [](int row) { return row; });
}

// The same for rows so short that lanes copy several at once.
template <class From>
JAX_EP_FN void copy_to_short_rows(const Team& team, char* received, int bytes, const int32_t* table, Range tokens,
                                  int top_k, From from) {
  for (int begin = tokens.begin * top_k; begin < tokens.end * top_k; begin += Team::lanes) {
    const int i = begin + team.lane;
    const int row = i < tokens.end * top_k ? table[i] : -1;
    char* to = nullptr;
    const char* landed = nullptr;
    if (row >= 0) {
      const int32_t* first = table + i / top_k * top_k;
      while (*first < 0) ++first;
      landed = from(i / top_k, *first);
      to = received + int64_t{row} * bytes;
    }
    copy_short(team, team.ballot(to != landed), to, landed, bytes);
  }
}

// How many rows each local expert has here.
struct RowCounts {
  const int32_t* counts;  // [sources, local_experts], of all ranks apart or together
  int sources, local_experts;
  int end;  // behind the last segment, or -1 if it is not known

  JAX_EP_FN int operator()(int expert) const {
    int rows = 0;
    for (int source = 0; source < sources; ++source) rows += counts[source * local_experts + expert];
    return rows;
  }
};

// Zeroes what holds no token: the padding of every segment, and all behind the last. `counts`: RowCounts, or alike.
template <class Counts>
JAX_EP_FN void zero_padding(Op& op, char* received, int64_t bytes, const Counts& counts, int capacity, int alignment) {
  const Team& team = op.team;
  const Place filler = team.filler;
  if (!op.ok() || filler.index < 0) return;
  op.enter(Phase::pad);
  const auto zero = [&](int begin, int end, int first, int step) {
    begin = larger(0, smaller(begin, capacity));  // what a user's counts add up to may have wrapped around
    for (int row = begin + first; row < smaller(end, capacity); row += step)
      fill_row(team, received + row * bytes, 0, bytes);
  };
  const auto pad = [&](int expert, const Segment& segment) {
    const bool mine = expert % filler.count == filler.index && segment.rows < segment.padded;
    for (uint64_t left = team.ballot(mine); left; left &= left - 1) {
      const int lane = lowest_bit(left), begin = team.from_lane(segment.start + segment.rows, lane);
      zero(begin, begin + team.from_lane(segment.padded - segment.rows, lane), 0, 1);
    }
  };
  const bool walks = counts.end < 0 || (alignment > 1 && filler.index < counts.local_experts);
  const int end = walks ? for_each_segment(team, counts.local_experts, alignment, counts, pad) : counts.end;
  zero(end, capacity, filler.index, filler.count);
}

}  // namespace jax_ep
