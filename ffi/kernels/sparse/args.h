// The arguments of the two ops of sparse_all_reduce. Shapes: R ranks, N entries a rank, D values a row, C capacity.
//
// Places 0 .. U - 1 number the different row ids of all ranks, in order. An entry without a row has the place U.
#pragma once

#include <algorithm>
#include <cstdint>

#include "comm/dtype.h"
#include "comm/platform.h"
#include "comm/signal_pad.h"
#include "kernels/op_spec.h"

namespace jax_ep {

constexpr int kMissing = 2;  // counters: see all_missing

struct SparseUnionArgs {
  int entries, num_rows, capacity;
  bool sharded;            // a rank's result has only the ids of its range of the table
  const int32_t* ids;      // [N] in any order; num_rows where there is none
  const int32_t* missing;  // [2] entries ignored and ids dropped earlier
  int32_t* indices;        // [C] of this rank's result
  int32_t* places;         // [R, N] of the entries of all ranks
  int32_t* bounds;         // [R + 1] ids below the range of each rank, and all ids
  int32_t* all_missing;    // [2] over all ranks
  uint32_t* bits;          // a bit per row of the table, and one more: some rank has the id
  int32_t* prefix;         // ids below each word of `bits`
  int32_t* coop_counts;    // [kMaxCoops] ids in each coop's words
};

// The entries of one rank for one row: the first entry, and their number.
struct Run {
  int32_t first, entries;
};
constexpr int32_t kNoEntry = INT32_MAX;

struct SparseReduceArgs {
  DType dtype;
  int entries, hidden, capacity;
  int places_kept;   // most places of a result: the length of `runs`
  int landing_room;  // rows that each peer may push; 0: owners fetch all rows
  bool sharded, drop;
  bool by_count;          // rows are divided by their number of entries
  float scale;            // otherwise they are multiplied by this
  const char* values;     // [N, D]
  const int32_t* places;  // [R, N]
  const int32_t* bounds;  // [R + 1]
  char* result;           // [C, D]
  Run* runs;              // [R, places_kept]
  int32_t* heads;         // [places_kept] the head of the chain of this rank's entries of a row
  int32_t* next;          // [N] in that chain
  int32_t* list_entries;  // [N] lists of a row's entries, if this rank has several, in order
  int32_t* begins;        // [places_kept] where the list of a row begins
  int32_t* listed;        // [1] the length of all lists
  int32_t* long_places;   // [N] the places of rows with long lists
  int32_t* long_lists;    // [1] the number of long lists
  int32_t* sent;          // [R] partial sums that were sent to each owner
  char* landing;          // of partial sums from peers
  float* partials;        // [N, D] sums over entries of this rank, at the first of them
};

// The most coops that count ids of sparse_union.
constexpr int kMaxCoops = 1024;

JAX_EP_CONSTANT_FN int bitmap_words(int num_rows) { return num_rows / 32 + 1; }

// The landing of sparse_reduce: a table of the positions of the holders' partial sums, by place, then the partial sums
// of every other rank. A sharded result has no landing, because its owners would only wait.
JAX_EP_CONSTANT_FN int landing_room(int entries, int ranks, bool sharded) {
  return ranks > 1 && !sharded ? (entries + ranks - 2) / (ranks - 1) : 0;
}
JAX_EP_CONSTANT_FN int64_t landing_table_bytes(int ranks, int places) {
  return (int64_t{ranks} * places * 4 + 127) / 128 * 128;
}
JAX_EP_CONSTANT_FN int64_t landing_bytes(int ranks, int places, int room, int64_t row_bytes) {
  return landing_table_bytes(ranks, places) + int64_t{room} * (ranks - 1) * row_bytes;
}

template <class Args>
std::optional<std::string> validate_entries(const Args& args, int ranks) {
  if (is_countable(int64_t{ranks} * args.entries)) return std::nullopt;
  return wrong("entries", concat("fewer than ", kCountable, " on all ", ranks, " ranks together"), args.entries);
}

template <>
struct OpSpec<SparseUnionArgs> : OpDefaults {
  using Args = SparseUnionArgs;
  static constexpr const char* kFfiTarget = "sparse_union";
  static constexpr KindName kKinds[] = {{OpKind::sparse_union, "sparse_all_reduce"}};
  static constexpr LaunchPolicy kLaunch{Senders::all, Ctas::by_union_rates};

  template <class Visit>
  static constexpr void settings(Visit visit) {
    visit("entries", "N", &Args::entries);
    visit("num_rows", "table rows", &Args::num_rows);
    visit("capacity", "capacity", &Args::capacity);
    visit("sharded", "sharded", &Args::sharded);
  }
  static std::optional<std::string> validate(const Args& args, int ranks) { return validate_entries(args, ranks); }
  static WorkSize work_size(const Args& args) { return {args.entries, false}; }

  template <class Visit>
  JAX_EP_CONSTANT_FN static void buffers(const Args& a, int ranks, Visit visit) {
    visit(operand("ids", Values::int32, a.entries), &Args::ids);
    visit(operand("missing", Values::int32, kMissing), &Args::missing);
    visit(result("indices", Values::int32, a.capacity).replicated(!a.sharded), &Args::indices);
    visit(result("places", Values::int32, ranks, a.entries).for_peers().replicated(), &Args::places);
    visit(result("bounds", Values::int32, ranks + 1).undelivered_as(Undelivered::size).replicated(), &Args::bounds);
    visit(result("all_missing", Values::int32, kMissing).undelivered_as(Undelivered::size).replicated(),
          &Args::all_missing);
    visit(scratch("bits", Values::int32, bitmap_words(a.num_rows)), &Args::bits);
    visit(scratch("prefix", Values::int32, bitmap_words(a.num_rows)), &Args::prefix);
    visit(scratch("coop_counts", Values::int32, kMaxCoops), &Args::coop_counts);
  }
};

template <>
struct OpSpec<SparseReduceArgs> : OpDefaults {
  using Args = SparseReduceArgs;
  static constexpr const char* kFfiTarget = "sparse_reduce";
  static constexpr KindName kKinds[] = {{OpKind::sparse_reduce, "sparse_all_reduce"}};
  static constexpr LaunchPolicy kLaunch{Senders::all, Ctas::one_an_item};

  template <class Visit>
  static constexpr void settings(Visit visit) {
    visit("dtype", nullptr, &Args::dtype);
    visit("entries", "N", &Args::entries);
    visit("hidden", "D", &Args::hidden);
    visit("capacity", "capacity", &Args::capacity);
    visit("places_kept", "places", &Args::places_kept);
    visit("scale", "scale bits", &Args::scale);
    visit("sharded", "sharded", &Args::sharded);
    visit("drop", "drop", &Args::drop);
    visit("by_count", "by count", &Args::by_count);
  }
  static std::optional<std::string> validate(const Args& args, int ranks) {
    if (std::optional<std::string> error = validate_row(args.hidden)) return error;
    return validate_entries(args, ranks);
  }
  static void complete(Args& args, int ranks, bool sends_ahead) {
    args.landing_room = sends_ahead ? landing_room(args.entries, ranks, args.sharded) : 0;
  }
  static WorkSize work_size(const Args& args) { return {std::max(args.entries, args.capacity), false}; }

  template <class Visit>
  JAX_EP_CONSTANT_FN static void buffers(const Args& a, int ranks, Visit visit) {
    const Values values = values_of(a.dtype);
    const int64_t landing = landing_bytes(ranks, a.places_kept, a.landing_room, int64_t{a.hidden} * size_of(a.dtype));
    visit(operand("values", values, a.entries, a.hidden).for_peers(), &Args::values);
    visit(operand("places", Values::int32, ranks, a.entries), &Args::places);
    visit(operand("bounds", Values::int32, ranks + 1), &Args::bounds);
    visit(result("result", values, a.capacity, a.hidden).for_peers().replicated(!a.sharded), &Args::result);
    visit(scratch("partials", Values::float32, a.entries, a.hidden).for_peers(), &Args::partials);
    visit(scratch("landing", Values::uint8, landing).for_peers(), &Args::landing);
    visit(scratch("runs", Values::int32, ranks, a.places_kept, 2), &Args::runs);
    visit(scratch("heads", Values::int32, a.places_kept), &Args::heads);
    visit(scratch("next", Values::int32, a.entries), &Args::next);
    visit(scratch("list_entries", Values::int32, a.entries), &Args::list_entries);
    visit(scratch("begins", Values::int32, a.places_kept), &Args::begins);
    visit(scratch("listed", Values::int32, 1), &Args::listed);
    visit(scratch("long_places", Values::int32, a.entries), &Args::long_places);
    visit(scratch("long_lists", Values::int32, 1), &Args::long_lists);
    visit(scratch("sent", Values::int32, ranks), &Args::sent);
  }
};

}  // namespace jax_ep
