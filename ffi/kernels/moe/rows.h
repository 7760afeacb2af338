// Moves rows along a routing: a rank sends each token once to each rank that needs it, and the receiver copies it to
// the token's other rows. A user may have changed a routing, so no value of it is used as an index unchecked.
#pragma once

#include "comm/integers.h"
#include "comm/op.h"
#include "comm/push.h"
#include "comm/signal_pad.h"
#include "comm/tickets.h"
#include "comm/window.h"
#include "kernels/moe/args.h"
#include "kernels/moe/layout.h"
#include "rows/movers.h"

namespace jax_ep {

// Tokens that a coop expands or reduces at a time. Tuned with `kernels_bench 2`.
constexpr int kBatchTokens = Coop::lanes == 1 ? 64 : 8;

// How a rank's tokens are cut up. Each chunk has a flag of its own, so that peers can use it while later chunks travel.
// A batch is the part of a chunk that one coop takes at a time. If tokens are few, each token is a chunk.
struct TokenSchedule {
  int tokens, chunk_tokens, chunks, batch_tokens;

  // `sources`: the ranks from which batches are taken. `coops`: the coops that take them. Batches are cut so that all
  // coops have work to the end of a chunk.
  JAX_EP_FN explicit TokenSchedule(int tokens, int sources = 0, int coops = 1, int most_tokens = kBatchTokens)
      : tokens(tokens),
        chunk_tokens(tokens <= kFewTokens ? 1 : larger(kChunkTokens, ceil_div(tokens, kMaxChunks))),
        chunks(larger(1, ceil_div(tokens, chunk_tokens))),
        batch_tokens(larger(1, smaller(most_tokens, smaller(chunk_tokens, tokens) * sources / coops))) {}

  JAX_EP_FN int batches() const { return ceil_div(smaller(chunk_tokens, tokens), batch_tokens); }
  JAX_EP_FN int chunk_of(int token) const { return token / chunk_tokens; }
  JAX_EP_FN Range chunk(int index) const { return {index * chunk_tokens, smaller((index + 1) * chunk_tokens, tokens)}; }
  JAX_EP_FN Range batch(int chunk_index, int index) const {
    const Range all = chunk(chunk_index);
    return {smaller(all.begin + index * batch_tokens, all.end),
            smaller(all.begin + (index + 1) * batch_tokens, all.end)};
  }
};

// Whether no assignment of the token before the k-th has this owner. All lanes call, each with its own k and, if top_k
// is at most Coop::lanes, perhaps with its own token.
template <class OwnerOf>
JAX_EP_FN bool first_at_owner(const Coop& coop, int top_k, int token, int k, int owner, OwnerOf owner_of) {
  if (Coop::lanes > 1 && top_k <= Coop::lanes)
    return coop.match(static_cast<int>(static_cast<uint32_t>(token) * (kMaxRanks + 1) + owner)).below == 0;
  for (int j = 0; j < k && k < top_k; ++j)
    if (owner_of(j) == owner) return false;
  return true;
}

// The address to which a token's k-th assignment is written. It is null if there is no k-th assignment, or if an
// earlier assignment of the token goes to the same peer. On this rank each assignment has an address. All lanes call,
// each with its own k, and perhaps with its own token.
class RowSink {
 public:
  // `window`: the number of the window in which the rows are.
  JAX_EP_FN RowSink(const Op& op, const int32_t* targets, int top_k, int capacity, int window)
      : op_(op), targets_(targets), top_k_(top_k), capacity_(capacity), by_capacity_(capacity), bases_(op, window) {}

  // packed(), target(), then row_at(): the first may be loaded ahead, and a target may serve for several buffers.
  JAX_EP_FN int packed(int token, int k) const {
    return token >= 0 && k < top_k_ ? targets_[int64_t{token} * top_k_ + k] : -1;
  }
  JAX_EP_FN Target target(int token, int k, int packed) const {
    const Target target = unpack(packed);
    const bool first = first_at_owner(op_.coop, top_k_, token, k, target.owner,
                                      [&](int j) { return unpack(this->packed(token, j)).owner; });
    return first || target.owner == op_.comm.rank ? target : Target{-1, -1};
  }
  JAX_EP_FN char* row_at(Target target, int64_t bytes) const {
    char* base = bases_.peer(target.owner);
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
  const LaneWindow<char> bases_;
};

// Pushes the tokens of `items` from source(token) to the addresses sink(token, k), and announces their chunks. Calls
// before_last() before the last chunks are announced. Then pushes a token of items.next_stolen(), and again those of
// `items`, until both are done.
template <class Items, class Source, class Sink, class BeforeLast>
JAX_EP_FN void push_chunks(Op& op, RowMover& mover, Items items, int num_tokens, int64_t bytes, int top_k,
                           Source source, Sink sink, BeforeLast before_last) {
  op.enter(Phase::send);
  const TokenSchedule schedule(num_tokens);
  Announcer announcer(op, schedule);
  uint64_t issued = op.ask_abort();  // for the next token, which hides the latency of the load
  int stolen = -1;
  const auto next = [&] {
    const int token = stolen < 0 ? items.next() : stolen;
    stolen = -1;
    const bool failed = op.take_abort(issued);
    issued = op.ask_abort();
    return failed ? -1 : token;
  };
  do {
    mover.move(next, bytes, top_k, source, sink, [&](int token, auto& rows) { announcer.after(token, rows); });
    before_last();
    announcer.finish(mover);
    stolen = items.next_stolen();
  } while (stolen >= 0);
}

// Visits `item`, then each next(); the last visit has a negative item. visit(item, loaded) gets what load(item)
// returned. The next item and the abort word are loaded before visit(), which hides their latency.
// Returns false once the group has failed.
template <class Next, class Load, class Visit>
JAX_EP_FN bool look_ahead(const Op& op, int item, Next next, Load load, Visit visit) {
  uint64_t issued = op.ask_abort();
  auto loaded = load(item);
  while (!op.take_abort(issued)) {
    const int following = item < 0 ? -1 : next();
    const auto its = load(following);
    issued = op.ask_abort();
    visit(item, loaded);
    if (item < 0) return true;
    item = following;
    loaded = its;
  }
  return false;
}

// Like push_chunks, one token at a time and pipelined: begin(token, packed_of) stores the previous token and starts to
// encode `token`; begin(-1, ...) stores the last. Takes no stolen tokens, so `items` must be RoutedTokens.
template <class Items, class Sink, class Encoder, class Begin>
JAX_EP_FN void push_items(Op& op, Items items, int num_tokens, int top_k, const Sink& sink, Encoder& encoder,
                          RowWriter& writer, Begin begin) {
  static_assert(!Items::kSteals, "push_items pushes the tokens of next() alone");
  op.enter(Phase::send);
  const TokenSchedule schedule(num_tokens);
  Announcer announcer(op, schedule);
  const auto load = [&](int token) { return token < 0 ? -1 : sink.packed(token, op.coop.lane); };
  const auto visit = [&](int token, int mine) {
    begin(token, [&](int k) { return k == op.coop.lane || op.coop.lane >= top_k ? mine : sink.packed(token, k); });
    announcer.begun(token, writer);
  };
  if (!look_ahead(op, items.next(), [&] { return items.next(); }, load, visit)) encoder.drop();
  announcer.finish(writer);
}

// How many chunks are here from all ranks, from number `chunk` on. If tokens are few, a coop takes about one chunk, and
// does not look.
JAX_EP_FN int count_chunks(const Op& op, const TokenSchedule& schedule, int chunk) {
  return op.ok() && schedule.chunk_tokens > 1 ? op.count_delivered(chunk, schedule.chunks - chunk) : 0;
}
// How many chunks are here from all ranks, from number `chunk` on. If none is, and `waits`, waits for `chunk`. Returns
// 1 if that wait fails, so check op.ok().
JAX_EP_FN int await_chunks(Op& op, const TokenSchedule& schedule, int chunk, bool waits = true) {
  if (op.comm.size == 1) return 1;
  if (const int whole = count_chunks(op, schedule, chunk); whole || !waits) return whole;
  op.wait_delivered(chunk);
  return 1;
}

// A batch of tokens of a source that arrive together.
struct Arrival {
  int source, chunk;
  Range tokens;
};

// The batches that all coops of this rank take by ticket, in the order of chunks, from every peer, and, if `own`, from
// this rank.
class Arrivals {
 public:
  JAX_EP_FN Arrivals(Op& op, int num_tokens, bool own, int most_tokens = kBatchTokens)
      : op_(op),
        sources_(op.comm.size - (own ? 0 : 1)),
        schedule_(num_tokens, sources_, op.coop.count, most_tokens),
        per_chunk_(sources_ * schedule_.batches()) {}

  JAX_EP_FN int batches() const { return schedule_.chunks * per_chunk_; }
  JAX_EP_FN int batch_tokens() const { return schedule_.batch_tokens; }
  // The last chunk may have batches without tokens.
  JAX_EP_FN Arrival batch(int ticket) const {
    const int chunk = ticket / per_chunk_, index = ticket % per_chunk_ / sources_;
    return {(op_.comm.rank + 1 + ticket % sources_) % op_.comm.size, chunk, schedule_.batch(chunk, index)};
  }

  JAX_EP_FN int chunk_of(int token) const { return schedule_.chunk_of(token); }

  // Whether this coop has seen that the source's chunk is here.
  JAX_EP_FN bool has_seen(int source, int chunk) {
    if (chunk != latest_) seen_ = 0;
    latest_ = chunk;
    return chunk < whole_ || seen_ >> source & 1;
  }
  // Call after has_seen() has returned false. Returns whether the chunk is here. If `waits`, returns when it is, or
  // when the op has failed. One look may see that all sources have sent many chunks.
  JAX_EP_FN bool see(int source, bool waits) {
    if (const int whole = count_chunks(op_, schedule_, latest_)) {
      whole_ = latest_ + whole;
    } else if (waits) {
      op_.wait_delivered(source, latest_);
      if (!op_.ok()) return true;
    } else if (!op_.coop.broadcast(op_.is_delivered(source, latest_))) {
      return false;
    }
    op_.enter(Phase::expand);
    seen_ |= uint64_t{1} << source;
    return true;
  }

 private:
  Op& op_;
  const int sources_;
  const TokenSchedule schedule_;
  const int per_chunk_;
  int latest_ = -1;    // chunk
  int whole_ = 0;      // all sources have sent the chunks before this one
  uint64_t seen_ = 0;  // a bit for each source whose latest chunk is here
};

// Calls visit(source, tokens) for each batch of Arrivals when it is here. All coops together wait for every chunk.
template <class Visit>
JAX_EP_FN void for_each_arrival(Op& op, int num_tokens, bool own, Visit visit) {
  Arrivals arrivals(op, num_tokens, own);
  for_each_ticket(op, arrivals.batches(), [&](int ticket) {
    const Arrival batch = arrivals.batch(ticket);
    if (!arrivals.has_seen(batch.source, batch.chunk)) arrivals.see(batch.source, /*waits=*/true);
    if (op.ok()) visit(batch.source, batch.tokens);
  });
}

// The rows that a token has on this rank.
struct TokenRows {
  int first, count;
};
template <class RowAt>
JAX_EP_FN TokenRows rows_of_token(const Coop& coop, int top_k, RowAt row_at) {
  TokenRows found{-1, 0};
  for (int begin = 0; begin < top_k; begin += Coop::lanes) {
    const int row = begin + coop.lane < top_k ? row_at(begin + coop.lane) : -1;
    const uint64_t present = coop.ballot(row >= 0);
    if (found.first < 0 && present) found.first = coop.from_lane(row, lowest_bit(present));
    found.count += count_bits(present);
  }
  return found;
}

// A row of a table that no user has touched.
struct Unchecked {
  JAX_EP_FN int operator()(int row) const { return row; }
};

// Copies each token from where it has landed, from(token, row), to its rows. `row` is the token's first row; the token
// may have landed in it. `table` has top_k rows for each token; valid(row) is negative if there is no row. Returns the
// number of tokens with a row.
template <class Mover, class From, class Valid = Unchecked>
JAX_EP_FN int copy_to_rows(const Coop& coop, Mover& mover, Stride tokens, char* rows, int64_t bytes,
                           const int32_t* table, int top_k, From from, Valid valid = {}) {
  const auto row_at = [&](int token, int k) { return valid(table[int64_t{token} * top_k + k]); };
  int filled = -1;  // the row in which the latest token has landed, if it landed in a row
  int tokens_here = 0;
  const auto source = [&](int token) -> const char* {
    const TokenRows found = rows_of_token(coop, top_k, [&](int k) { return row_at(token, k); });
    const char* landed = from(token, found.first);
    tokens_here += found.count > 0;
    filled = landed == rows + found.first * bytes ? found.first : -1;
    return found.count > (filled < 0 ? 0 : 1) ? landed : nullptr;
  };
  const auto sink = [&](int token, int k) -> char* {
    const int row = k < top_k ? row_at(token, k) : -1;
    return row >= 0 && row != filled ? rows + row * bytes : nullptr;
  };
  mover.move([&] { return tokens.next(); }, bytes, top_k, source, sink, [](int, auto&) {});
  return tokens_here;
}

// copy_to_rows for short rows: the lanes copy several rows at once.
template <class From>
JAX_EP_FN void copy_to_short_rows(const Coop& coop, char* rows, int bytes, const int32_t* table, Range tokens,
                                  int top_k, From from) {
  for (int begin = tokens.begin * top_k; begin < tokens.end * top_k; begin += Coop::lanes) {
    const int i = begin + coop.lane;
    const int row = i < tokens.end * top_k ? table[i] : -1;
    char* to = nullptr;
    const char* landed = nullptr;
    if (row >= 0) {
      const int32_t* first = table + i / top_k * top_k;
      while (*first < 0) ++first;
      landed = from(i / top_k, *first);
      to = rows + int64_t{row} * bytes;
    }
    copy_short_rows(coop, coop.ballot(to != landed), to, landed, bytes);
  }
}

// Whether a rank may have rows to zero: unused rows, or the padding of segments.
template <class Args>
JAX_EP_FN bool zeroes_rows(const Args& args) {
  return args.zero_unused || args.alignment > 1;
}

// Calls fill(begin, end, part) for this receiver's part of the rows without a token: the padding of every segment, and,
// if `unused`, the rows past the last segment. `counts`: RowCounts (segments.h) or BoundedCounts (scatter.h). All lanes
// call.
template <class Args, class Counts, class Fill>
JAX_EP_FN void for_each_gap(Op& op, const Args& args, const Counts& counts, bool unused, Fill fill) {
  const int capacity = args.capacity, alignment = args.alignment;
  const Coop& coop = op.coop;
  const Part receiver = coop.receiver;
  if (!op.ok() || receiver.empty()) return;
  op.enter(Phase::pad);
  const auto within = [&](int begin, int end, Part part) {  // a sum of a user's counts may have wrapped around
    fill(larger(0, smaller(begin, capacity)), smaller(end, capacity), part);
  };
  const auto pad = [&](int expert, const Segment& segment) {
    const bool mine = expert % receiver.count == receiver.index && segment.rows < segment.padded;
    for (uint64_t left = coop.ballot(mine); left; left &= left - 1) {
      const int lane = lowest_bit(left), begin = coop.from_lane(segment.start + segment.rows, lane);
      within(begin, begin + coop.from_lane(segment.padded - segment.rows, lane), {0, 1});
    }
  };
  const bool walks = counts.end < 0 || (alignment > 1 && receiver.index < counts.local_experts);
  const int end = walks ? for_each_segment(coop, counts.local_experts, alignment, counts, pad) : counts.end;
  if (unused) within(end, capacity, receiver);
}

// Zeroes the rows without a token; rows past the last segment only if args.zero_unused. `rows`: the rows, or their
// scales.
template <class Args, class Counts>
JAX_EP_FN void zero_padding(Op& op, const Args& args, char* rows, int64_t bytes, const Counts& counts) {
  if (!zeroes_rows(args)) return;
  for_each_gap(op, args, counts, args.zero_unused, [&](int begin, int end, Part part) {
    for (int row = begin + part.index; row < end; row += part.count) fill_row(op.coop, rows + row * bytes, 0, bytes);
  });
}

// Checks the values of a leaf of a routing, because a user may have changed them. In hot loops every lane checks a
// value before it uses the value as an index. report() or report_to_all() reports at the end.
class Bound {
 public:
  JAX_EP_FN Bound(RoutingLeaf leaf, int end) : leaf_(leaf), end_(end) {}  // at least 1

  // The value, or -1 if it is not below the end. Negative values stand for none and are returned as they are.
  JAX_EP_FN int index(int value) {
    if (value >= end_) found_ = value;
    return value < end_ ? value : -1;
  }
  // The value, or 0 where it is not in [0, end).
  JAX_EP_FN int count(int value) {
    const bool within = static_cast<uint32_t>(value) < static_cast<uint32_t>(end_);
    if (!within) found_ = value;
    return within ? value : 0;
  }

  // For a value that another coop reports.
  JAX_EP_FN void forget() { found_ = 0; }
  JAX_EP_FN bool broken() const { return found_ != 0; }
  JAX_EP_FN void report(const Op& op) const {
    if (broken()) op.report_invalid(op.comm.rank, static_cast<int>(leaf_), end_, found_);
  }
  // Reports what was found, and refuses the op, so that peers deliver nothing either. All lanes call, after the peers
  // have posted and before this coop delivers the last of its part.
  JAX_EP_FN void report_to_all(const Op& op) const {
    if (!op.coop.ballot(broken())) return;
    report(op);
    op.refuse();
  }

 private:
  const RoutingLeaf leaf_;
  const int end_;
  int found_ = 0;  // a value out of bounds, or 0, which is never out of bounds
};

}  // namespace jax_ep
