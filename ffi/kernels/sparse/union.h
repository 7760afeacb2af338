// sparse_union: every rank learns the row ids of every other, marks them all in a bitmap of its own, and reads
// from a prefix of its popcounts which slot each id has. No sort, no search, and the same answer on every rank.
#pragma once

#include "comm/op.h"
#include "comm/squads.h"
#include "kernels/results.h"
#include "kernels/sparse/args.h"

namespace jax_ep {

class SparseUnion {
 public:
  JAX_EP_FN SparseUnion(Op& op, const SparseUnionArgs& args)
      : op_(op),
        args_(args),
        words_(bitmap_words(args.num_rows)),
        my_words_(share(words_, op.team.index, op.team.count)),
        bits_(reinterpret_cast<uint32_t*>(args.scratch)),
        prefix_(args.scratch + bitmap_prefix_offset(args.num_rows)),
        team_counts_(args.scratch + bitmap_counts_offset(args.num_rows)) {}

  JAX_EP_FN void run() {
    op_.enter(Phase::count);
    for_my_words([&](int word) { bits_[word] = 0; });
    if (op_.ok() && op_.team.index == 0)
      for (int peer = op_.team.lane; peer < op_.comm.size; peer += Team::lanes)
        for (int i = 0; i < kMissing; ++i) op_.mail(peer, op_.comm.rank)->counts[i] = args_.missing[i];
    op_.post(args_.slots);
    op_.wait_posted();
    push_entries();
    op_.barrier();  // the bitmap is clear
    op_.wait_delivered(0);
    op_.enter(Phase::count);
    mark_ids();
    op_.barrier();
    op_.enter(Phase::count);
    count_ids();
    op_.barrier();
    op_.enter(Phase::layout);
    number_ids();
    op_.barrier();
    op_.enter(Phase::place);
    place();
  }

 private:
  // All entries of all ranks, lane by lane over all teams.
  template <class Visit>
  JAX_EP_FN void for_my_entries(Visit visit) const {
    const int step = op_.team.count * Team::lanes, all = op_.comm.size * args_.entries;
    if (!op_.ok()) return;
    for (int64_t i = op_.team.index * Team::lanes + op_.team.lane; i < all; i += step) visit(i);
  }

  template <class Visit>
  JAX_EP_FN void for_my_words(Visit visit) const {
    for (int word = my_words_.begin + op_.team.lane; word < my_words_.end; word += Team::lanes) visit(word);
  }

  // This rank's ids, to every rank.
  JAX_EP_FN void push_entries() {
    const Place pusher = op_.team.pusher;
    if (!op_.may_push() || pusher.index < 0) return;
    op_.enter(Phase::send);
    const Range mine = share(args_.entries, pusher.index, pusher.count);
    const int64_t here = int64_t{op_.comm.rank} * args_.entries;
    for (int first = mine.begin; first < mine.end && op_.may_push(); first += Team::lanes) {
      const int i = first + op_.team.lane;
      if (i >= mine.end) continue;
      const int32_t id = args_.ids[i];
      for (int step = 0; step < op_.comm.size; ++step) {
        const Mail* box = op_.mail_from((op_.comm.rank + step) % op_.comm.size);
        static_cast<int32_t*>(box->buffers[0])[here + i] = id;
      }
    }
    op_.team.sync();
    op_.deliver(0, 1, pusher.count);
  }

  JAX_EP_FN void mark_ids() {
    for_my_entries([&](int64_t i) {
      const int id = args_.slots[i];
      if (id < args_.num_rows) atomic_or(&bits_[id / 32], 1u << id % 32);
    });
  }

  JAX_EP_FN void count_ids() {
    int count = 0;
    for_my_words([&](int word) { count += count_bits(bits_[word]); });
    count = op_.team.sum(count);
    if (op_.team.lane == 0) team_counts_[op_.team.index] = count;
  }

  // Writes for every word of this team how many ids lie below it.
  JAX_EP_FN void number_ids() {
    if (!op_.ok()) return;
    int before = 0;
    for (int team = op_.team.lane; team < op_.team.index; team += Team::lanes) before += team_counts_[team];
    before = op_.team.sum(before);
    for (int first = my_words_.begin; first < my_words_.end; first += Team::lanes) {
      const int word = first + op_.team.lane;
      int total = 0;
      const int offset = op_.team.exclusive_scan(word < my_words_.end ? count_bits(bits_[word]) : 0, &total);
      if (word < my_words_.end) prefix_[word] = before + offset;
      before += total;
    }
  }

  // How many ids lie below this one, at most num_rows: the slot of an id.
  JAX_EP_FN int ids_below(int id) const {
    return prefix_[id / 32] + count_bits(bits_[id / 32] & ((1u << id % 32) - 1));
  }

  JAX_EP_FN void place() {
    if (!op_.ok()) return;
    for_my_entries([&](int64_t i) { args_.slots[i] = ids_below(args_.slots[i]); });
    const Range range =
        args_.sharded ? row_range(args_.num_rows, op_.comm.rank, op_.comm.size) : Range{0, args_.num_rows};
    const Range mine{ids_below(range.begin), ids_below(range.end)};
    for_my_words([&](int word) {
      int slot = prefix_[word];
      for (uint32_t left = bits_[word]; left; left &= left - 1, ++slot)
        if (slot >= mine.begin && slot < mine.end && slot - mine.begin < args_.capacity)
          args_.indices[slot - mine.begin] = word * 32 + lowest_bit(left);
    });
    const int step = op_.team.count * Team::lanes;
    for (int64_t i = int64_t{mine.end} - mine.begin + op_.team.index * Team::lanes + op_.team.lane; i < args_.capacity;
         i += step)
      args_.indices[i] = args_.num_rows;
    if (op_.team.index == 0) summarise();
  }

  JAX_EP_FN void summarise() {
    for (int rank = op_.team.lane; rank <= op_.comm.size; rank += Team::lanes)
      args_.bounds[rank] = ids_below(row_range(args_.num_rows, rank, op_.comm.size).begin);
    for (int i = op_.team.lane; i < kMissing; i += Team::lanes) {
      int over_ranks = 0;
      for (int rank = 0; rank < op_.comm.size; ++rank) over_ranks += op_.mail_from(rank)->counts[i];
      args_.all_missing[i] = over_ranks;
    }
  }

  Op& op_;
  const SparseUnionArgs& args_;
  const int words_;
  const Range my_words_;
  uint32_t* const bits_;
  int32_t* const prefix_;
  int32_t* const team_counts_;
};

JAX_EP_FN void run_kernel(const Comm& comm, const SparseUnionArgs& args, const Team& all) {
  const Team team = join_op(comm, all);
  Op op(comm, team, OpKind::sparse_union);
  const Results<SparseUnionArgs> results(args, comm.size);
  if (team.squad.index >= 0) {
    op.poison(results);
    SparseUnion(op, args).run();
  }
  op.finish(results, all.count);
}

}  // namespace jax_ep
