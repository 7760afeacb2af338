// Sums of the entries of this rank that name the same row: so that each row crosses the wire once. Entries are added up
// in order, those of long lists in parts of RunLists::kShort, and then the parts, in order.
#pragma once

#include "kernels/sparse/runs.h"
#include "rows/direct_sum.h"

namespace jax_ep {

template <class T>
class RunSums {
 public:
  JAX_EP_FN RunSums(Op& op, const SparseReduceArgs& args, const SparseRuns& runs, bool words)
      : op_(op), args_(args), lists_(op, args, runs), words_(words) {}

  // When the runs are there; peers may read the sums behind the next barrier. `single`: also of an only entry, where
  // another rank has several.
  JAX_EP_FN void run(bool single) {
    op_.enter(Phase::layout);
    lists_.allocate(single);
    op_.barrier();
    // Coops of a CTA read the same numbers, unless all of them have failed (Op::meet): then some may return early, and
    // the barriers of the others do not wait for coops that have ended.
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
  static constexpr int kWindowsPerCoop = 4;  // at least, so that all have about as much to read
  // A part has few rows, often two: of each, several packs come at once. A long list has many parts.
  using PartSum = DirectSum<T, float>;
  using LongSum = DirectSum<float, float, 16>;

  // Columns that a coop takes: those it sums at a time, or more on the CPU, where coops are few.
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

  // A coop takes the parts that begin in a window of positions, in a range of columns: about as many rows as positions.
  JAX_EP_FN void sum_parts() const {
    op_.enter(Phase::reduce);
    const Coop& coop = op_.coop;
    const int listed = lists_.count(), ranges = column_ranges<PartSum>();
    const int64_t fair = int64_t{listed} * ranges / (coop.count * kWindowsPerCoop);
    const int window = fair < Coop::lanes ? larger(1, static_cast<int>(fair)) : Coop::lanes;
    const int64_t windows = (listed + window - 1) / window;
    for (int64_t i = coop.index; op_.ok() && i < windows * ranges; i += coop.count) {
      const int first = static_cast<int>(i / ranges) * window, mine = first + coop.lane;
      const bool here = coop.lane < window && mine < listed;
      const Range list = here ? lists_.at(mine) : Range{0, 0};
      for (uint64_t left = coop.ballot(here && (mine - list.begin) % kPart == 0); left; left &= left - 1) {
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
      const Range list = lists_.of(lists_.long_slot(static_cast<int>(i / ranges)));
      const int parts = (list.end - list.begin + kPart - 1) / kPart;
      sum_rows<LongSum>(args_.partials, list.begin, parts, kPart, columns<LongSum>(i % ranges));
    }
  }

  // Puts the sum of the rows of every step-th member where the first one's partial sum lies.
  template <class Sum, class In>
  JAX_EP_FN void sum_rows(const In* rows, int position, int count, int step, Range columns) const {
    float* sum = args_.partials + int64_t{lists_.member(position)} * args_.hidden + columns.begin;
    const auto target =
        line_up<char>(op_.coop, 1, [sum](int) { return Term<char>{reinterpret_cast<char*>(sum), 1.0f}; });
    int mine = 0;  // lanes ask for as many members at once
    const auto row_of = [&](int i) {
      if (i % Coop::lanes == 0 && i + op_.coop.lane < count)
        mine = lists_.member(position + (i + op_.coop.lane) * step);
      return rows + int64_t{op_.coop.from_lane(mine, i % Coop::lanes)} * args_.hidden + columns.begin;
    };
    Sum(op_.coop, words_).sum(count, row_of, columns.end - columns.begin, target, 1.0f);
  }

  Op& op_;
  const SparseReduceArgs& args_;
  const RunLists lists_;
  const bool words_;
};

}  // namespace jax_ep
