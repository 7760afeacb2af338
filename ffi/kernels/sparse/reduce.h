// sparse_reduce: one of the ranks that hold a row owns it. The others send their partial sums to the owner, which adds
// them up and writes the sum into the row's place in the result of every rank.
//
// A rank first sums its own entries of a row, so that each row is sent once.
#pragma once

#include <type_traits>

#include "comm/ctas.h"
#include "comm/op.h"
#include "comm/tickets.h"
#include "comm/window.h"
#include "kernels/sparse/args.h"
#include "kernels/sparse/runs.h"
#include "rows/row_sum.h"

namespace jax_ep {

// The owner of a row among its holders, which have a bit per rank. A hash of the place picks it, so that no pattern of
// ids gives one rank more rows.
JAX_EP_FN int pick_owner(uint64_t holders, int place) {
  const uint32_t mixed = static_cast<uint32_t>(place) * 0x9e3779b1u;
  int left = static_cast<int>((uint64_t{mixed} * static_cast<uint32_t>(count_bits(holders))) >> 32);
  for (; left > 0; --left) holders &= holders - 1;
  return lowest_bit(holders);
}

// An owner receives other holders' partial sums here. A holder has room for some of them at each owner, and fills it in
// any order. The owner fetches a partial sum without room from its holder.
class SparseLanding {
 public:
  JAX_EP_FN SparseLanding(const Op& op, const SparseReduceArgs& args, int64_t row_bytes)
      : op_(op), args_(args), row_bytes_(row_bytes), room_(args.landing_room) {}

  JAX_EP_FN bool has_room() const { return room_ > 0; }

  // Called before the peers may write, and followed by a barrier.
  JAX_EP_FN void clear() const {
    if (!op_.ok() || !has_room()) return;
    auto* table = reinterpret_cast<int32_t*>(args_.landing);
    const int64_t all = int64_t{op_.comm.size} * args_.places_kept, step = op_.coop.count * Coop::lanes;
    for (int64_t i = op_.coop.index * Coop::lanes + op_.coop.lane; i < all; i += step) table[i] = -1;
    if (op_.coop.index == 0)
      for (int rank = op_.coop.lane; rank < op_.comm.size; rank += Coop::lanes) args_.sent[rank] = 0;
  }

  // The address for this rank's partial sum of a row at the owner, or null. All lanes call.
  JAX_EP_FN char* claim(int owner, int place) const {
    int row_in_room = 0;
    if (op_.coop.lane == 0) row_in_room = atomic_add(&args_.sent[owner], 1);
    row_in_room = op_.coop.broadcast(row_in_room);
    if (row_in_room >= room_) return nullptr;
    char* const landing = Window<char>(op_, kWindow<&SparseReduceArgs::landing>).peer(owner);
    if (op_.coop.lane == 0) *table_entry(landing, op_.comm.rank, place) = row_in_room;
    return row(landing, owner, op_.comm.rank, row_in_room);
  }

  // The partial sum of another holder, or null if it is not in the landing. Called after kPartials of all ranks.
  JAX_EP_FN const char* find(int holder, int place) const {
    if (!has_room()) return nullptr;
    const int row_in_room = *table_entry(args_.landing, holder, place);
    return row_in_room < 0 ? nullptr : row(args_.landing, op_.comm.rank, holder, row_in_room);
  }

 private:
  JAX_EP_FN int32_t* table_entry(char* landing, int holder, int place) const {
    return reinterpret_cast<int32_t*>(landing) + int64_t{holder} * args_.places_kept + place;
  }
  JAX_EP_FN char* row(char* landing, int owner, int holder, int row_in_room) const {
    const int region = (holder - owner - 1 + op_.comm.size) % op_.comm.size;
    return landing + landing_table_bytes(op_.comm.size, args_.places_kept) +
           (int64_t{region} * room_ + row_in_room) * row_bytes_;
  }

  const Op& op_;
  const SparseReduceArgs& args_;
  const int64_t row_bytes_;
  const int room_;
};

template <class T>
class SparseReduce {
 public:
  JAX_EP_FN SparseReduce(Op& op, const SparseReduceArgs& args)
      : op_(op),
        args_(args),
        runs_(op, args),
        row_bytes_(int64_t{args.hidden} * static_cast<int>(sizeof(T))),
        words_(in_words(args.values, args.result, row_bytes_)),
        landing_(op, args, row_bytes_),
        sums_(op.coop, words_) {}

  // The rows of a rank's result, not negative even if the bounds are wrong.
  JAX_EP_FN int rows_of(int rank) const {
    const int begin = args_.sharded ? larger(0, args_.bounds[rank]) : 0;
    return larger(0, larger(0, args_.bounds[args_.sharded ? rank + 1 : op_.comm.size]) - begin);
  }
  // The first rank whose rows exceed the capacity, or -1. The same on all ranks.
  JAX_EP_FN int rank_without_room() const {
    for (int rank = 0; !args_.drop && rank < op_.comm.size; ++rank)
      if (rows_of(rank) > args_.capacity) return rank;
    return -1;
  }

  // Finds and sums the entries of each row on this rank. Needs no peer.
  JAX_EP_FN void prepare() {
    op_.enter(Phase::layout);
    runs_.clear();
    landing_.clear();
    op_.barrier();
    op_.enter(Phase::layout);
    runs_.fill();
    op_.barrier();
    RunSums<T>(op_, args_, runs_, words_).run(/*single=*/!kFloats);
    op_.barrier();
  }

  // Sends rows that only this rank holds to the results, and partial sums of other rows to their owners. Waits for no
  // peer.
  JAX_EP_FN void push() {
    if (!op_.ok()) return;
    op_.enter(Phase::send);
    for_each_row<&SignalPad::push_ticket>([&](const Row& row) { return sends(row); },
                                          [&](const Row& row) { send(row); }, [&](const Row& row) { count_rows(row); });
    op_.deliver(kPartials, 1, op_.coop.count);
  }

  // Sums the shared rows that this rank owns, into the results of all ranks that want them.
  JAX_EP_FN void reduce() {
    if (landing_.has_room()) op_.wait_delivered(kPartials);
    if (!op_.ok()) return;
    op_.enter(Phase::reduce);
    for_each_row<&SignalPad::ticket>([&](const Row& row) { return is_shared(row) && row.owner == op_.comm.rank; },
                                     [&](const Row& row) { sum(row); }, [](const Row&) {});
    op_.deliver(kSums, 1, op_.coop.count);  // peers' rows are not read any more
  }
  JAX_EP_FN void wait() { op_.wait_delivered(kSums); }

  JAX_EP_FN void pad() const {
    const Part receiver = op_.coop.receiver;
    if (!op_.ok() || receiver.empty()) return;
    op_.enter(Phase::pad);
    const Range places = places_of(op_.comm.rank);
    const int64_t first = int64_t{places.end} - places.begin + receiver.index;  // a stride may pass 2^31
    for (int64_t row = first; row < args_.capacity; row += receiver.count)
      fill_row(op_.coop, args_.result + row * row_bytes_, 0, row_bytes_);
  }

 private:
  // Batches per coop, so that all coops have work to the end, and places per batch. Tuned with `bench sparse`.
  static constexpr int kBatchesPerCoop = 8;
  static constexpr int kBatchPlaces = Coop::lanes > kBatchTokens ? Coop::lanes : kBatchTokens;
  static constexpr int kPartials = 0, kSums = 1;  // chunks
  static constexpr bool kFloats = std::is_same_v<T, float>;

  // A row: its holders, its owner, and the rank that wants it if the result is sharded.
  struct Row {
    int place;
    Holding held;
    int owner, home;
  };

  // The places of a rank's result that exist, even if the bounds are wrong.
  JAX_EP_FN Range places_of(int rank) const {
    const int begin = args_.sharded ? smaller(larger(0, args_.bounds[rank]), runs_.places()) : 0;
    return {begin, begin + larger(0, smaller(smaller(rows_of(rank), args_.capacity), runs_.places() - begin))};
  }

  // Batches of different results alternate: if all ranks began with the same result, they would use only that rank's
  // links.
  struct Batches {
    int places, homes, count;
  };
  JAX_EP_FN Batches place_batches() const {
    const int homes = args_.sharded ? op_.comm.size : 1;
    int longest = 0;
    for (int home = 0; home < homes; ++home) longest = larger(longest, smaller(rows_of(home), args_.capacity));
    const int places = larger(1, smaller(kBatchPlaces, longest / larger(1, op_.coop.count * kBatchesPerCoop / homes)));
    return {places, homes, (longest + places - 1) / places * homes};
  }

  // Coops take batches of places by ticket. Each lane calls look(row) for a row of its own, which may have no holder.
  // Then all lanes call visit(row) together for each row for which wanted(row) is true. On return the results of
  // visit() are written.
  template <uint64_t SignalPad::* kNumbers, class Wanted, class Visit, class Look>
  JAX_EP_FN void for_each_row(Wanted wanted, Visit visit, Look look) {
    sums_.acquire();
    const Batches batches = place_batches();
    for (Tickets<kNumbers> tickets(op_); op_.may_push();) {
      const int ticket = tickets.current();
      if (ticket >= batches.count) break;
      tickets.draw_ahead();
      const int home = (op_.comm.rank + 1 + ticket) % batches.homes;
      const Range all = places_of(home);
      const int begin = all.begin + ticket / batches.homes * batches.places,
                end = smaller(begin + batches.places, all.end);
      for (int first = begin; first < end; first += Coop::lanes) {
        const int place = first + op_.coop.lane;
        Row mine{place, place < end ? runs_.holding(place) : Holding{0, 0, 0}, -1, home};
        if (mine.held.ranks) mine.owner = owner_of(mine);
        look(mine);
        for (uint64_t left = op_.coop.ballot(mine.held.ranks && wanted(mine)); left && op_.may_push(); left &= left - 1)
          visit(op_.coop.from_lane(mine, lowest_bit(left)));
      }
    }
    if (op_.may_push())
      sums_.finish();
    else
      sums_.drop();
    sums_.complete_to(sums_.puts());
  }

  // The holder that sums a row. In a sharded result it is the rank that wants the row, if that rank holds it.
  JAX_EP_FN int owner_of(const Row& row) const {
    return args_.sharded && row.held.ranks >> row.home & 1 ? row.home : pick_owner(row.held.ranks, row.place);
  }
  JAX_EP_FN bool is_shared(const Row& row) const { return (row.held.ranks & (row.held.ranks - 1)) != 0; }

  // Counts bytes from every peer: its sums for this rank, and its partial sums for this rank, which may be float32. All
  // lanes call.
  JAX_EP_FN void count_rows(const Row& row) const {
    const bool wanted_here = !args_.sharded || row.home == op_.comm.rank, mine = row.owner == op_.comm.rank;
    const bool wide = !kFloats && row.held.crowded;
    for (int rank = 0; rank < op_.comm.size; ++rank) {
      const bool partial = mine && row.held.ranks >> rank & 1, sum = row.owner == rank && wanted_here;
      const int rows = count_bits(op_.coop.ballot(sum || (partial && !wide)));
      const int wide_rows = count_bits(op_.coop.ballot(partial && wide));
      if (op_.coop.lane == 0) op_.count_received(rank, rows * row_bytes_ + wide_rows * int64_t{args_.hidden} * 4);
    }
  }

  JAX_EP_FN bool sends(const Row& row) const {
    if (!is_shared(row)) return row.owner == op_.comm.rank;
    const bool held_here = row.held.ranks >> op_.comm.rank & 1;
    return landing_.has_room() && held_here && row.owner != op_.comm.rank && (kFloats || !row.held.crowded);
  }
  JAX_EP_FN void send(const Row& row) {
    if (!is_shared(row)) return sum(row);
    char* there = landing_.claim(row.owner, row.place);
    if (!there) return;  // the owner fetches it
    sums_.sum(terms_of<const T>(op_.coop, 1, [&](int) { return own_term(row.place); }),
              terms_of<char>(op_.coop, 1, [there](int) { return WeightedRow<char>{there, 1.0f}; }), args_.hidden);
  }

  JAX_EP_FN void sum(const Row& row) {
    const Coop& coop = op_.coop;
    const int ranks = op_.comm.size;
    const int64_t offset = int64_t{row.place - places_of(row.home).begin} * row_bytes_;
    const auto sinks = terms_of<char>(coop, args_.sharded ? 1 : ranks, [&](int i) {
      const int rank = args_.sharded ? row.home : (op_.comm.rank + i) % ranks;
      return WeightedRow<char>{results_.peer(rank) + offset, 1.0f};
    });
    const float scale = args_.by_count ? 1.0f / static_cast<float>(row.held.entries) : args_.scale;
    if (kFloats || !row.held.crowded)
      sums_.sum(terms_of<const T>(coop, ranks, [&](int rank) { return term_of(rank, row, scale); }), sinks,
                args_.hidden);
    else
      DirectSum<float, T>(coop, words_)
          .sum(ranks, [&](int rank) { return partial_of(rank, row.place); }, args_.hidden, sinks, scale);
  }

  // A rank's partial sum of a row: in the landing, or at the rank.
  JAX_EP_FN WeightedRow<const T> term_of(int rank, const Row& row, float weight) const {
    if (!(row.held.ranks >> rank & 1)) return {nullptr, 0.0f};
    const char* landed = rank == op_.comm.rank ? nullptr : landing_.find(rank, row.place);
    return {landed ? reinterpret_cast<const T*>(landed) : held_by(rank, row.place), weight};
  }
  // The partial sum at its holder: its only entry, or the sum of several.
  JAX_EP_FN const T* held_by(int rank, int place) const {
    if constexpr (kFloats)
      if (runs_.entries(rank, place) > 1) return partial_of(rank, place);
    return values_.peer(rank) + int64_t{runs_.first(rank, place)} * args_.hidden;
  }
  JAX_EP_FN WeightedRow<const T> own_term(int place) const { return {held_by(op_.comm.rank, place), 1.0f}; }
  JAX_EP_FN const float* partial_of(int rank, int place) const {
    if (runs_.entries(rank, place) == 0) return nullptr;
    return partials_.peer(rank) + int64_t{runs_.first(rank, place)} * args_.hidden;
  }

  Op& op_;
  const SparseReduceArgs& args_;
  SparseRuns runs_;
  const int64_t row_bytes_;
  const bool words_;
  SparseLanding landing_;
  const Window<const T> values_{op_, kWindow<&SparseReduceArgs::values>};
  const Window<char> results_{op_, kWindow<&SparseReduceArgs::result>};
  const Window<const float> partials_{op_, kWindow<&SparseReduceArgs::partials>};
  RowSum<T> sums_;
};

template <class T>
JAX_EP_FN void reduce_rows(Op& op, const SparseReduceArgs& args) {
  SparseReduce<T> reduction(op, args);
  const int full = reduction.rank_without_room();
  if (full < 0) reduction.prepare();
  op.post(window_addresses(args, op.comm.size));
  op.wait_posted();
  if (full < 0) {
    reduction.push();
    reduction.reduce();
    reduction.pad();
    reduction.wait();
  } else if (op.ok() && op.coop.index == 0 && op.coop.lane == 0) {
    op.report_capacity(full, args.capacity, reduction.rows_of(full));
  }
}

template <class T>
JAX_EP_FN void run_kernel(const Comm& comm, const SparseReduceArgs& args, const Coop& all) {
  const Coop coop = join_op(comm, all);
  Op op(comm, coop, kind_of(args));
  const Results<SparseReduceArgs> results(args, comm.size);
  if (!coop.cta.empty()) {
    op.poison(results);
    reduce_rows<T>(op, args);
  }
  op.finish(results, all.count);
}

}  // namespace jax_ep
