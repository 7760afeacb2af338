// The holders of each row. SparseRuns finds the entries of every rank by place. RunLists finds this rank's entries of
// the same row, and RunSums sums them.
#pragma once

#include "comm/op.h"
#include "kernels/sparse/args.h"
#include "rows/direct_sum.h"

namespace jax_ep {

struct Holding {
  uint64_t ranks;  // a bit for each holder
  int entries;     // of all ranks
  int crowded;     // whether some rank has several entries
};

class SparseRuns {
 public:
  JAX_EP_FN SparseRuns(const Op& op, const SparseReduceArgs& args)
      : op_(op), args_(args), places_(smaller(args.places_kept, larger(0, args.bounds[op.comm.size]))) {}

  // The number of places that a result keeps. Later places are dropped.
  JAX_EP_FN int places() const { return places_; }
  JAX_EP_FN bool has(int place) const { return place >= 0 && place < places_; }
  JAX_EP_FN Run run(int rank, int place) const { return args_.runs[int64_t{rank} * args_.places_kept + place]; }
  JAX_EP_FN int first(int rank, int place) const { return run(rank, place).first; }
  JAX_EP_FN int entries(int rank, int place) const { return run(rank, place).entries; }

  JAX_EP_FN int place_of(int rank, int i) const { return args_.places[int64_t{rank} * args_.entries + i]; }

  JAX_EP_FN Holding holding(int place) const {
    Holding found{0, 0, 0};
    for (int rank = 0; rank < op_.comm.size; ++rank) {
      const int entries = run(rank, place).entries;
      found.ranks |= uint64_t{entries > 0} << rank;
      found.entries += entries;
      found.crowded |= entries > 1;
    }
    return found;
  }

  // Call both before the first lookup, each followed by a barrier. fill() also chains this rank's entries of each row,
  // in no order.
  JAX_EP_FN void clear() {
    for (int rank = 0; rank < op_.comm.size; ++rank)
      for_my_part(places_, [&](int place) { args_.runs[int64_t{rank} * args_.places_kept + place] = {kNoEntry, 0}; });
    for_my_part(places_, [&](int place) { args_.heads[place] = kNoEntry; });
    for_my_part(1, [&](int) { *args_.listed = *args_.long_lists = 0; });
  }
  JAX_EP_FN void fill() {
    for (int rank = 0; rank < op_.comm.size; ++rank)
      for_my_part(args_.entries, [&](int i) {
        const int place = place_of(rank, i);
        if (!has(place)) return;
        Run& held = args_.runs[int64_t{rank} * args_.places_kept + place];
        atomic_min(&held.first, i);
        atomic_add(&held.entries, 1);
        if (rank == op_.comm.rank) args_.next[i] = atomic_exchange(&args_.heads[place], i);
      });
  }

  // Calls visit(i) for i < count, over the lanes of all coops.
  template <class Visit>
  JAX_EP_FN void for_my_part(int count, Visit visit) const {
    if (!op_.ok()) return;
    const int64_t step = int64_t{op_.coop.count} * Coop::lanes;  // count + step may not fit an int
    for (int64_t i = int64_t{op_.coop.index} * Coop::lanes + op_.coop.lane; i < count; i += step)
      visit(static_cast<int>(i));
  }

 private:
  const Op& op_;
  const SparseReduceArgs& args_;
  const int places_;
};

// Lists of this rank's entries of the same row. The entries of a list are adjacent in `list_entries`, in order.
class RunLists {
 public:
  // The most entries of a short list. One coop finds them by their chain. All sizes in this file are tuned with `bench
  // sparse`.
  static constexpr int kShort = 32;

  JAX_EP_FN RunLists(const Op& op, const SparseReduceArgs& args, const SparseRuns& runs)
      : op_(op), args_(args), runs_(runs) {}

  // Gives each list its range of `list_entries`. Called when the runs are filled. `single`: a single entry also gets a
  // list if another rank has several entries.
  JAX_EP_FN void allocate(bool single) const {
    runs_.for_my_part(args_.entries, [&](int i) {
      const int place = runs_.place_of(op_.comm.rank, i);
      if (!runs_.has(place)) return;
      const Run run = runs_.run(op_.comm.rank, place);
      if (run.first != i) return;
      const bool listed = run.entries > 1 || (single && runs_.holding(place).crowded);
      args_.begins[place] = listed ? atomic_add(args_.listed, run.entries) : kNoEntry;
      if (run.entries > kShort) args_.long_places[atomic_add(args_.long_lists, 1)] = place;
    });
  }

  // Fills the lists. Called after a barrier.
  JAX_EP_FN void fill() const {
    runs_.for_my_part(args_.entries, [&](int i) { list_entry(i); });
    // Each coop takes one slice of one long list at a time.
    const int lists = count_long(), slices = larger(1, op_.coop.count / larger(1, lists));
    for (int i = op_.coop.index; op_.ok() && i < lists * slices; i += op_.coop.count)
      list_slice(long_place(i / slices), part_of(args_.entries, i % slices, slices));
  }

  // The entries of all lists; the number of long lists, and their places.
  JAX_EP_FN int count() const { return *args_.listed; }
  JAX_EP_FN int count_long() const { return *args_.long_lists; }
  JAX_EP_FN int long_place(int i) const { return args_.long_places[i]; }

  JAX_EP_FN int entry(int position) const { return args_.list_entries[position]; }
  // The list of a place, and the list that contains a position.
  JAX_EP_FN Range of(int place) const {
    const int begin = args_.begins[place];
    return {begin, begin + runs_.entries(op_.comm.rank, place)};
  }
  JAX_EP_FN Range at(int position) const { return of(runs_.place_of(op_.comm.rank, entry(position))); }

 private:
  static constexpr int kAhead = Coop::lanes == 1 ? 16 : 64;  // places that a lane loads at once

  // The position of an entry in a short list is the number of smaller entries in its chain.
  JAX_EP_FN void list_entry(int i) const {
    const int place = runs_.place_of(op_.comm.rank, i);
    if (!runs_.has(place) || runs_.entries(op_.comm.rank, place) > kShort) return;
    const int begin = args_.begins[place];
    if (begin == kNoEntry) return;
    int smaller_ones = 0;
    for (int j = args_.heads[place]; j != kNoEntry; j = args_.next[j]) smaller_ones += j < i;
    args_.list_entries[begin + smaller_ones] = i;
  }

  // Writes the entries of a long list that are in a slice of all entries. Counts those before the slice.
  JAX_EP_FN void list_slice(int place, Range slice) const {
    const Coop& coop = op_.coop;
    int before = 0;
    look_through({0, slice.begin}, [&](int, const int(&places)[kAhead]) {
      for (const int each : places) before += each == place;
    });
    int position = args_.begins[place] + coop.sum(before);
    look_through(slice, [&](int first, const int(&places)[kAhead]) {
      for (int w = 0; w < kAhead; ++w) {
        const uint64_t found = coop.ballot(places[w] == place);
        if (places[w] == place)
          args_.list_entries[position + count_bits(found & ((uint64_t{1} << coop.lane) - 1))] =
              first + w * Coop::lanes + coop.lane;
        position += count_bits(found);
      }
    });
  }

  // Calls visit(first, places) for each part of the entries. Each lane has the places of every Coop::lanes-th entry of
  // the part, or -1.
  template <class Visit>
  JAX_EP_FN void look_through(Range entries, Visit visit) const {
    for (int first = entries.begin; first < entries.end; first += kAhead * Coop::lanes) {
      int places[kAhead];
      for (int w = 0; w < kAhead; ++w) {
        const int i = first + w * Coop::lanes + op_.coop.lane;
        places[w] = i < entries.end ? runs_.place_of(op_.comm.rank, i) : -1;
      }
      visit(first, places);
    }
  }

  const Op& op_;
  const SparseReduceArgs& args_;
  const SparseRuns& runs_;
};

// Sums this rank's entries of each row, so that a row is sent once. Entries are added in order. In a long list, parts
// of RunLists::kShort entries are summed first, then the parts, in order.
template <class T>
class RunSums {
 public:
  JAX_EP_FN RunSums(Op& op, const SparseReduceArgs& args, const SparseRuns& runs, bool words)
      : op_(op), args_(args), lists_(op, args, runs), words_(words) {}

  // Called when the runs are filled. Peers may read the sums after the next barrier. `single`: as in allocate().
  JAX_EP_FN void run(bool single) {
    op_.enter(Phase::layout);
    lists_.allocate(single);
    op_.barrier();
    // Coops of a CTA read the same numbers, unless all of them have failed (Op::meet). Then some may return early.
    // Barriers do not wait for coops that have ended.
    if (lists_.count() == 0) return;
    op_.enter(Phase::layout);
    lists_.fill();
    op_.barrier();
    sum_parts();
    if (lists_.count_long() == 0) return;
    op_.barrier();
    sum_long_lists();
  }

 private:
  static constexpr int kPart = RunLists::kShort;
  static constexpr int kRangesPerCoop = 4;  // at least, so that coops read about equally much
  // A part often has two rows, so several packs of each are in flight. A long list has many parts.
  using PartSum = DirectSum<T, float>;
  using LongSum = DirectSum<float, float, 16>;

  // Columns of a coop: one batch of the sum, or more on the CPU, which has few coops.
  template <class Sum>
  static constexpr int kColumns = Coop::lanes == 1 ? 1024 : Sum::kBatch;
  template <class Sum>
  JAX_EP_FN int column_ranges() const {
    return (args_.hidden + kColumns<Sum> - 1) / kColumns<Sum>;
  }
  template <class Sum>
  JAX_EP_FN Range columns(int64_t i) const {
    const int begin = static_cast<int>(i) * kColumns<Sum>;
    return {begin, smaller(begin + kColumns<Sum>, args_.hidden)};
  }

  // A coop takes the parts that begin in a range of positions, in a range of columns.
  JAX_EP_FN void sum_parts() const {
    op_.enter(Phase::reduce);
    const Coop& coop = op_.coop;
    const int listed = lists_.count(), ranges = column_ranges<PartSum>();
    const int64_t fair = int64_t{listed} * ranges / (coop.count * kRangesPerCoop);
    const int positions = fair < Coop::lanes ? larger(1, static_cast<int>(fair)) : Coop::lanes;
    const int64_t batches = (listed + positions - 1) / positions;
    for (int64_t i = coop.index; op_.ok() && i < batches * ranges; i += coop.count) {
      const int first = static_cast<int>(i / ranges) * positions, mine = first + coop.lane;
      const bool in_range = coop.lane < positions && mine < listed;
      const Range list = in_range ? lists_.at(mine) : Range{0, 0};
      for (uint64_t left = coop.ballot(in_range && (mine - list.begin) % kPart == 0); left; left &= left - 1) {
        const int lane = lowest_bit(left), position = first + lane;
        const int rows = smaller(kPart, coop.from_lane(list.end, lane) - position);
        sum_rows<PartSum>(reinterpret_cast<const T*>(args_.values), position, rows, 1, columns<PartSum>(i % ranges));
      }
    }
  }

  JAX_EP_FN void sum_long_lists() const {
    op_.enter(Phase::reduce);
    const int ranges = column_ranges<LongSum>();
    for (int64_t i = op_.coop.index; op_.ok() && i < int64_t{lists_.count_long()} * ranges; i += op_.coop.count) {
      const Range list = lists_.of(lists_.long_place(static_cast<int>(i / ranges)));
      const int parts = (list.end - list.begin + kPart - 1) / kPart;
      sum_rows<LongSum>(args_.partials, list.begin, parts, kPart, columns<LongSum>(i % ranges));
    }
  }

  // Sums the rows of every step-th entry into the partial sum of the first one.
  template <class Sum, class In>
  JAX_EP_FN void sum_rows(const In* rows, int position, int count, int step, Range columns) const {
    float* sum = args_.partials + int64_t{lists_.entry(position)} * args_.hidden + columns.begin;
    const auto sink =
        terms_of<char>(op_.coop, 1, [sum](int) { return WeightedRow<char>{reinterpret_cast<char*>(sum), 1.0f}; });
    int mine = 0;  // each lane loads one entry ahead
    const auto row_of = [&](int i) {
      if (i % Coop::lanes == 0 && i + op_.coop.lane < count) mine = lists_.entry(position + (i + op_.coop.lane) * step);
      return rows + int64_t{op_.coop.from_lane(mine, i % Coop::lanes)} * args_.hidden + columns.begin;
    };
    Sum(op_.coop, words_).sum(count, row_of, columns.end - columns.begin, sink, 1.0f);
  }

  Op& op_;
  const SparseReduceArgs& args_;
  const RunLists lists_;
  const bool words_;
};

}  // namespace jax_ep
