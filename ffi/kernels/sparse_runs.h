// Who holds which row: the entries of every rank, looked up by slot.
#pragma once

#include "kernels/op.h"
#include "kernels/sparse_args.h"

namespace jax_ep {

// What a slot's runs say about its row.
struct Holding {
  uint64_t ranks;  // a bit for each that holds the row
  int entries;     // of all ranks
  int crowded;     // some rank has several: then every holder sums its own before it is asked for them
};

class SparseRuns {
 public:
  JAX_EP_FN SparseRuns(const Op& op, const SparseReduceArgs& args)
      : op_(op), args_(args), slots_(smaller(args.slots_kept, args.bounds[op.comm.size])) {}

  // Slots that have a place: all others are dropped.
  JAX_EP_FN int slots() const { return slots_; }
  JAX_EP_FN Run run(int rank, int slot) const { return args_.runs[int64_t{rank} * args_.slots_kept + slot]; }

  // The slot of the i-th sorted entry of a rank.
  JAX_EP_FN int slot_of(int rank, int i) const { return args_.slots[int64_t{rank} * args_.entries + i]; }

  JAX_EP_FN Holding holding(int slot) const {
    Holding found{0, 0, 0};
    for (int rank = 0; rank < op_.comm.size; ++rank) {
      const Run held = run(rank, slot);
      const int entries = held.end - held.begin;
      found.ranks |= uint64_t{entries > 0} << rank;
      found.entries += entries;
      found.crowded |= entries > 1;
    }
    return found;
  }

  // Both before the first lookup, with a barrier after each.
  JAX_EP_FN void clear() {
    for (int rank = 0; rank < op_.comm.size; ++rank)
      for_my_share(slots_, [&](int slot) { args_.runs[int64_t{rank} * args_.slots_kept + slot] = {0, 0}; });
  }
  JAX_EP_FN void fill() {
    for (int rank = 0; rank < op_.comm.size; ++rank)
      for_my_share(args_.entries, [&](int i) {
        const int slot = slot_of(rank, i);
        if (slot < 0 || slot >= slots_) return;
        Run& held = args_.runs[int64_t{rank} * args_.slots_kept + slot];
        if (i == 0 || slot_of(rank, i - 1) != slot) held.begin = i;
        if (i == args_.entries - 1 || slot_of(rank, i + 1) != slot) held.end = i + 1;
      });
  }

 private:
  // Lane by lane over all teams.
  template <class Visit>
  JAX_EP_FN void for_my_share(int count, Visit visit) const {
    if (!op_.ok()) return;
    for (int i = op_.team.index * Team::lanes + op_.team.lane; i < count; i += op_.team.count * Team::lanes) visit(i);
  }

  const Op& op_;
  const SparseReduceArgs& args_;
  const int slots_;
};

}  // namespace jax_ep
