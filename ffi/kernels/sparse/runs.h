// Who holds which row: the entries of every rank, looked up by slot.
#pragma once

#include "comm/op.h"
#include "kernels/sparse/args.h"

namespace jax_ep {

// What a slot's runs say about its row.
struct Holding {
  uint64_t ranks;  // a bit for each that holds the row
  int entries;     // of all ranks
  int crowded;     // some rank has several
};

class SparseRuns {
 public:
  JAX_EP_FN SparseRuns(const Op& op, const SparseReduceArgs& args)
      : op_(op), args_(args), slots_(smaller(args.slots_kept, args.bounds[op.comm.size])) {}

  // Slots that have a place: all others are dropped.
  JAX_EP_FN int slots() const { return slots_; }
  JAX_EP_FN bool has(int slot) const { return slot >= 0 && slot < slots_; }
  JAX_EP_FN Run run(int rank, int slot) const { return args_.runs[int64_t{rank} * args_.slots_kept + slot]; }
  JAX_EP_FN int first(int rank, int slot) const { return run(rank, slot).first; }
  JAX_EP_FN int entries(int rank, int slot) const { return run(rank, slot).entries; }

  // The slot of the i-th entry of a rank.
  JAX_EP_FN int slot_of(int rank, int i) const { return args_.slots[int64_t{rank} * args_.entries + i]; }

  JAX_EP_FN Holding holding(int slot) const {
    Holding found{0, 0, 0};
    for (int rank = 0; rank < op_.comm.size; ++rank) {
      const int entries = run(rank, slot).entries;
      found.ranks |= uint64_t{entries > 0} << rank;
      found.entries += entries;
      found.crowded |= entries > 1;
    }
    return found;
  }

  // Both before the first lookup, with a barrier after each. `fill` also chains the entries of each row of this rank,
  // in no order.
  JAX_EP_FN void clear() {
    for (int rank = 0; rank < op_.comm.size; ++rank)
      for_my_share(slots_, [&](int slot) { args_.runs[int64_t{rank} * args_.slots_kept + slot] = {kNoEntry, 0}; });
    for_my_share(slots_, [&](int slot) { args_.heads[slot] = kNoEntry; });
    for_my_share(1, [&](int) { *args_.listed = *args_.long_lists = 0; });
  }
  JAX_EP_FN void fill() {
    for (int rank = 0; rank < op_.comm.size; ++rank)
      for_my_share(args_.entries, [&](int i) {
        const int slot = slot_of(rank, i);
        if (!has(slot)) return;
        Run& held = args_.runs[int64_t{rank} * args_.slots_kept + slot];
        atomic_min(&held.first, i);
        atomic_add(&held.entries, 1);
        if (rank == op_.comm.rank) args_.next[i] = atomic_exchange(&args_.heads[slot], i);
      });
  }

  // Calls visit(i) for i < count, lane by lane over all teams.
  template <class Visit>
  JAX_EP_FN void for_my_share(int count, Visit visit) const {
    if (!op_.ok()) return;
    for (int i = op_.team.index * Team::lanes + op_.team.lane; i < count; i += op_.team.count * Team::lanes) visit(i);
  }

 private:
  const Op& op_;
  const SparseReduceArgs& args_;
  const int slots_;
};

}  // namespace jax_ep
