// sparse_reduce: every row is summed by one of the ranks that hold it, straight from the other holders' buffers, and
// written into its slot of the result on every rank.
//
// Entries of one rank that name the same row are summed by that rank first, so that each crosses the wire as one row.
#pragma once

#include <type_traits>

#include "kernels/direct_sum.h"
#include "kernels/row_sum.h"
#include "kernels/sparse_runs.h"

namespace jax_ep {

template <class T>
class SparseReduce {
 public:
  JAX_EP_FN SparseReduce(Op& op, const SparseReduceArgs& args)
      : op_(op),
        args_(args),
        runs_(op, args),
        row_bytes_(int64_t{args.hidden} * static_cast<int>(sizeof(T))),
        words_(in_words(args.values, args.result, row_bytes_)),
        sums_(op.team, words_) {}

  // Rows that a rank's result should hold.
  JAX_EP_FN int rows_of(int rank) const {
    return args_.sharded ? args_.bounds[rank + 1] - args_.bounds[rank] : args_.bounds[op_.comm.size];
  }
  // The first rank that has no room for them, or -1. All ranks come to the same answer.
  JAX_EP_FN int rank_without_room() const {
    for (int rank = 0; !args_.drop && rank < op_.comm.size; ++rank)
      if (rows_of(rank) > args_.capacity) return rank;
    return -1;
  }

  // All that needs no peer.
  JAX_EP_FN void prepare() {
    op_.enter(Phase::layout);
    runs_.clear();
    op_.barrier();
    op_.enter(Phase::layout);
    runs_.fill();
    op_.barrier();
    op_.enter(Phase::reduce);
    sum_short_runs();
    sum_long_runs();
    op_.barrier();
  }

  // Sums the rows that this rank owns, into the results of all ranks that want them.
  JAX_EP_FN void reduce() {
    if (!op_.ok() || op_.team.pusher.index < 0) return;
    op_.enter(Phase::send);
    sums_.acquire();
    const Range slots = slots_here();
    for (uint64_t asked = op_.ask_for_ticket(); op_.may_push();) {
      const int64_t begin = slots.begin + int64_t{op_.take_ticket(asked)} * kGroupSlots;
      if (begin >= slots.end) break;
      asked = op_.ask_for_ticket();
      reduce_group(static_cast<int>(begin), smaller(kGroupSlots, slots.end - static_cast<int>(begin)));
    }
    if (op_.may_push())
      sums_.finish();
    else
      sums_.drop();
    sums_.complete_to(sums_.mark());
    op_.deliver(0, 1, op_.team.pusher.count);  // the rows are there, and no peer's values are read any more
  }

  // Zeroes what holds no row.
  JAX_EP_FN void pad() const {
    const Place filler = op_.team.filler;
    if (!op_.ok() || filler.index < 0) return;
    op_.enter(Phase::pad);
    const Range slots = slots_here();
    for (int row = slots.end - slots.begin + filler.index; row < args_.capacity; row += filler.count)
      fill_row(op_.team, args_.result + row * row_bytes_, 0, row_bytes_);
  }

 private:
  // Slots that a team takes at a time.
  static constexpr int kGroupSlots = Team::lanes > kGroupTokens ? Team::lanes : kGroupTokens;
  // From so many entries on, the columns of a run are summed by different teams.
  static constexpr int kLongRun = 128;

  // The slots whose rows this rank's result holds, in order.
  JAX_EP_FN Range slots_here() const {
    const int begin = args_.sharded ? args_.bounds[op_.comm.rank] : 0;
    return {begin, begin + smaller(rows_of(op_.comm.rank), args_.capacity)};
  }

  JAX_EP_FN void reduce_group(int begin, int count) {
    for (int first = 0; first < count; first += Team::lanes) {
      const int slot = begin + first + op_.team.lane;
      const Holding mine = slot < begin + count ? runs_.holding(slot) : Holding{0, 0, 0};
      const bool own = mine.ranks && (args_.sharded || pick_owner(mine.ranks, slot) == op_.comm.rank);
      for (uint64_t left = op_.team.ballot(own); left && op_.may_push(); left &= left - 1) {
        const int lane = lowest_bit(left);
        reduce_row(begin + first + lane, op_.team.from_lane(mine, lane));
      }
    }
  }

  JAX_EP_FN void reduce_row(int slot, const Holding& holding) {
    const Team& team = op_.team;
    const int ranks = op_.comm.size;
    const int64_t row = slot - slots_here().begin;
    const auto places = line_up<char>(team, args_.sharded ? 1 : ranks, [&](int i) {
      const int rank = (op_.comm.rank + i) % ranks;
      return Term<char>{static_cast<char*>(op_.mail_from(rank)->buffers[1]) + row * row_bytes_, 1.0f};
    });
    const float scale = args_.by_count ? 1.0f / static_cast<float>(holding.entries) : args_.scale;
    if (!holding.crowded)
      sums_.sum(line_up<const T>(team, ranks, [&](int rank) { return entry_of(rank, slot, scale); }), places,
                args_.hidden);
    else if constexpr (std::is_same_v<T, float>)
      sums_.sum(line_up<const T>(team, ranks, [&](int rank) { return Term<const T>{partial_of(rank, slot), scale}; }),
                places, args_.hidden);
    else
      DirectSum<float, T>(team, words_)
          .sum(ranks, [&](int rank) { return partial_of(rank, slot); }, {0, args_.hidden}, places, scale);
  }

  // What a rank adds to a row: its only entry ...
  JAX_EP_FN Term<const T> entry_of(int rank, int slot, float weight) const {
    const Run held = runs_.run(rank, slot);
    if (held.begin == held.end) return {nullptr, 0.0f};
    const auto* values = static_cast<const T*>(op_.mail_from(rank)->buffers[0]);
    const int64_t entry = args_.orders[int64_t{rank} * args_.entries + held.begin];
    return {values + entry * args_.hidden, weight};
  }
  // ... or the sum of its entries.
  JAX_EP_FN const float* partial_of(int rank, int slot) const {
    const Run held = runs_.run(rank, slot);
    if (held.begin == held.end) return nullptr;
    return static_cast<const float*>(op_.mail_from(rank)->buffers[2]) + int64_t{held.begin} * args_.hidden;
  }

  // This rank's run at its i-th sorted entry, if it has to be summed here.
  JAX_EP_FN Run crowded_run(int i) const {
    const int slot = i < args_.entries ? runs_.slot_of(op_.comm.rank, i) : -1;
    if (slot < 0 || slot >= runs_.slots() || !runs_.holding(slot).crowded) return {0, 0};
    return runs_.run(op_.comm.rank, slot);
  }

  // A team each.
  JAX_EP_FN void sum_short_runs() {
    const Team& team = op_.team;
    for (int first = team.index * Team::lanes; op_.ok() && first < args_.entries; first += team.count * Team::lanes) {
      const Run mine = crowded_run(first + team.lane);
      const bool wanted = mine.end > mine.begin && mine.end - mine.begin < kLongRun && mine.begin == first + team.lane;
      for (uint64_t left = team.ballot(wanted); left; left &= left - 1) {
        const Run run = team.from_lane(mine, lowest_bit(left));
        sum_run(run, {0, args_.hidden});
      }
    }
  }

  // Found by looking at so few entries that every team can: their columns are dealt out to all.
  JAX_EP_FN void sum_long_runs() {
    constexpr int kStep = kLongRun / 2, kColumns = DirectSum<T, float>::kValues;
    const Team& team = op_.team;
    int turn = 0;
    for (int first = 0; op_.ok() && first < args_.entries; first += kStep * Team::lanes) {
      const int i = first + kStep * team.lane;
      const Run mine = crowded_run(i);
      const bool wanted = mine.end - mine.begin >= kLongRun && mine.begin > i - kStep;
      for (uint64_t left = team.ballot(wanted); left; left &= left - 1) {
        const Run run = team.from_lane(mine, lowest_bit(left));
        for (int column = 0; column < args_.hidden; column += kColumns)
          if (turn++ % team.count == team.index) sum_run(run, {column, smaller(column + kColumns, args_.hidden)});
      }
    }
  }

  JAX_EP_FN void sum_run(Run run, Range columns) const {
    const int32_t* order = args_.orders + int64_t{op_.comm.rank} * args_.entries + run.begin;
    const auto* values = reinterpret_cast<const T*>(args_.values);
    float* sum = args_.partials + int64_t{run.begin} * args_.hidden;
    const auto place =
        line_up<char>(op_.team, 1, [sum](int) { return Term<char>{reinterpret_cast<char*>(sum), 1.0f}; });
    const auto row_of = [&](int i) { return values + int64_t{order[i]} * args_.hidden; };
    DirectSum<T, float>(op_.team, words_).sum(run.end - run.begin, row_of, columns, place, 1.0f);
  }

  Op& op_;
  const SparseReduceArgs& args_;
  SparseRuns runs_;
  const int64_t row_bytes_;
  const bool words_;
  RowSum<T> sums_;
};

template <class T>
JAX_EP_FN void run_kernel(const Comm& comm, const SparseReduceArgs& args, const Team& team) {
  Op op(comm, team, OpKind::sparse_reduce);
  const Buffer results[] = {{args.result, int64_t{args.capacity} * args.hidden * static_cast<int>(sizeof(T))}};
  op.poison(results);
  SparseReduce<T> reduction(op, args);
  const int full = reduction.rank_without_room();
  if (full < 0) reduction.prepare();
  op.post(const_cast<char*>(args.values), args.result, args.partials);
  op.wait_posted();
  if (full < 0) {
    reduction.reduce();
    reduction.pad();
    op.wait_delivered(0);
  } else if (op.ok() && team.index == 0 && team.lane == 0) {
    op.report(Failure::capacity, full, full, args.capacity, reduction.rows_of(full));
  }
  op.finish(results);
}

}  // namespace jax_ep
