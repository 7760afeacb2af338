// Sums of the entries of this rank that name the same row: so that each row crosses the wire once. The entries are
// listed, those of a row side by side and in order, then added up.
#pragma once

#include "kernels/direct_sum.h"
#include "kernels/sparse_runs.h"

namespace jax_ep {

template <class T>
class RunSums {
 public:
  JAX_EP_FN RunSums(Op& op, const SparseReduceArgs& args, const SparseRuns& runs, bool words)
      : op_(op), args_(args), runs_(runs), words_(words) {}

  // When the runs are there; peers may read the sums behind the next barrier. `single`: also of an only entry, where
  // another rank has several.
  JAX_EP_FN void run(bool single) {
    list(single);
    op_.barrier();
    // Teams of a squad read the same numbers, unless all of them have failed (Op::meet): then some may return early,
    // and the barriers of the others do not wait for teams that have ended.
    if (*args_.listed == 0) return;
    sum_parts();
    if (*args_.cut == 0) return;
    op_.barrier();
    sum_lists();
  }

 private:
  static constexpr int kShort = 32;                            // so few entries of a row are found by their chain
  static constexpr int kWindows = Team::lanes == 1 ? 16 : 64;  // in flight, where a team looks through all entries
  static constexpr int kPart = 32;                             // entries of a row that one team sums

  JAX_EP_FN void list(bool single) {
    op_.enter(Phase::layout);
    const Team& team = op_.team;
    for (int first = team.index * Team::lanes; op_.ok() && first < args_.entries; first += team.count * Team::lanes) {
      const int i = first + team.lane, slot = i < args_.entries ? runs_.slot_of(op_.comm.rank, i) : -1;
      const int entries = leads(i, slot, single) ? runs_.entries(op_.comm.rank, slot) : 0;
      const int begin = entries ? atomic_add(args_.listed, entries) : 0;
      if (entries > kPart) atomic_add(args_.cut, 1);
      for (uint64_t left = team.ballot(entries > 0); left; left &= left - 1) {
        const int lane = lowest_bit(left);
        const int row = team.from_lane(slot, lane), place = team.from_lane(begin, lane);
        const int many = team.from_lane(entries, lane);
        if (many <= kShort)
          list_chain(row, place, many);
        else
          list_matches(first + lane, row, place, many);
      }
      if (entries) args_.next[i] = begin;  // nobody follows the chain any more
    }
  }

  JAX_EP_FN bool leads(int i, int slot, bool single) const {
    if (!runs_.has(slot)) return false;
    const Run run = runs_.run(op_.comm.rank, slot);
    return run.first == i && (run.entries > 1 || (single && runs_.holding(slot).crowded));
  }

  // Follows the chain once for as many entries as there are lanes, each of which counts the smaller ones for its own.
  JAX_EP_FN void list_chain(int slot, int begin, int entries) {
    const Team& team = op_.team;
    for (int done = 0; done < entries; done += Team::lanes) {
      int mine = kNoEntry, smaller_ones = 0, at = 0;
      for (int i = args_.heads[slot]; i != kNoEntry; i = args_.next[i], ++at)
        if (at == done + team.lane) mine = i;
      for (int i = args_.heads[slot]; i != kNoEntry; i = args_.next[i]) smaller_ones += i < mine;
      if (mine != kNoEntry) args_.members[begin + smaller_ones] = mine;
    }
    team.sync();
  }

  // By looking at every entry from the first on.
  JAX_EP_FN void list_matches(int first, int slot, int begin, int entries) {
    const Team& team = op_.team;
    for (int place = begin; place < begin + entries && first < args_.entries; first += kWindows * Team::lanes) {
      int held[kWindows];
      for (int w = 0; w < kWindows; ++w) {
        const int i = first + w * Team::lanes + team.lane;
        held[w] = i < args_.entries ? runs_.slot_of(op_.comm.rank, i) : -1;
      }
      for (int w = 0; w < kWindows; ++w) {
        const uint64_t found = team.ballot(held[w] == slot);
        if (held[w] == slot)
          args_.members[place + count_bits(found & ((uint64_t{1} << team.lane) - 1))] =
              first + w * Team::lanes + team.lane;
        place += count_bits(found);
      }
    }
  }

  JAX_EP_FN int entry(int place) const { return args_.members[place]; }
  // The list that a place is in.
  JAX_EP_FN Range list_at(int place) const {
    const Run run = runs_.run(op_.comm.rank, runs_.slot_of(op_.comm.rank, entry(place)));
    const int begin = args_.next[run.first];
    return {begin, begin + run.entries};
  }

  // Parts of each list, a team each.
  JAX_EP_FN void sum_parts() {
    op_.enter(Phase::reduce);
    for_each_place([&](int place, const Range& list) { return (place - list.begin) % kPart == 0; },
                   [&](int place, const Range& list) {
                     const auto* values = reinterpret_cast<const T*>(args_.values);
                     sum_rows(values, smaller(kPart, list.end - place), place, 1);
                   });
  }
  // Lists of several parts.
  JAX_EP_FN void sum_lists() {
    op_.enter(Phase::reduce);
    for_each_place([&](int place, const Range& list) { return place == list.begin && list.end - place > kPart; },
                   [&](int place, const Range& list) {
                     sum_rows(args_.partials, (list.end - place + kPart - 1) / kPart, place, kPart);
                   });
  }

  // Calls sum(place, list) for the places in lists that are wanted, each on one team.
  template <class Wanted, class Sum>
  JAX_EP_FN void for_each_place(Wanted wanted, Sum sum) const {
    const Team& team = op_.team;
    const int places = *args_.listed, step = team.count * Team::lanes;
    for (int64_t first = team.index; op_.ok() && first < places; first += step) {
      const int64_t mine = first + team.lane * team.count;  // neighbours are on different teams
      const Range list = mine < places ? list_at(static_cast<int>(mine)) : Range{0, 0};
      for (uint64_t left = team.ballot(mine < places && wanted(static_cast<int>(mine), list)); left; left &= left - 1)
        sum(static_cast<int>(first) + lowest_bit(left) * team.count, team.from_lane(list, lowest_bit(left)));
    }
  }

  // Puts the sum of the rows of some members at the first one's place among the partial sums.
  template <class In>
  JAX_EP_FN void sum_rows(const In* rows, int count, int place, int step) const {
    float* sum = args_.partials + int64_t{entry(place)} * args_.hidden;
    const auto target =
        line_up<char>(op_.team, 1, [sum](int) { return Term<char>{reinterpret_cast<char*>(sum), 1.0f}; });
    int mine = 0;  // lanes ask for as many members at once
    const auto row_of = [&](int i) {
      if (i % Team::lanes == 0 && i + op_.team.lane < count) mine = entry(place + (i + op_.team.lane) * step);
      return rows + int64_t{op_.team.from_lane(mine, i % Team::lanes)} * args_.hidden;
    };
    DirectSum<In, float>(op_.team, words_).sum(count, row_of, args_.hidden, target, 1.0f);
  }

  Op& op_;
  const SparseReduceArgs& args_;
  const SparseRuns& runs_;
  const bool words_;
};

}  // namespace jax_ep
