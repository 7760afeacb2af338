// sparse_union: every rank sends its row ids to all ranks, and marks all ids in its own bitmap. Prefix sums of the
// bitmap's popcounts are the places of the ids.
#pragma once

#include "comm/ctas.h"
#include "comm/op.h"
#include "comm/window.h"
#include "kernels/sparse/args.h"

namespace jax_ep {

// A rank's contiguous range of the rows of a table. Empty if no rows are left for the rank.
JAX_EP_FN Range row_range(int num_rows, int rank, int ranks) {
  const int64_t rows = (int64_t{num_rows} + ranks - 1) / ranks, begin = rank * rows, end = begin + rows;
  return {static_cast<int>(begin < num_rows ? begin : num_rows), static_cast<int>(end < num_rows ? end : num_rows)};
}

class SparseUnion {
 public:
  JAX_EP_FN SparseUnion(Op& op, const SparseUnionArgs& args)
      : op_(op),
        args_(args),
        my_words_(part_of(bitmap_words(args.num_rows), op.coop.index, op.coop.count)),
        bits_(args.bits),
        prefix_(args.prefix),
        coop_counts_(args.coop_counts) {}

  JAX_EP_FN void run() {
    op_.enter(Phase::count);
    for_my_words([&](int word) { bits_[word] = 0; });
    if (op_.ok() && op_.coop.index == 0)
      for (int rank = op_.coop.lane; rank < op_.comm.size; rank += Coop::lanes)
        for (int i = 0; i < kMissing; ++i) SentMail(op_).ints(rank)[i] = args_.missing[i];
    op_.post(window_addresses(args_, op_.comm.size));
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
    write_places();
  }

 private:
  template <class Visit>
  JAX_EP_FN void for_my_entries(Visit visit) const {
    const int step = op_.coop.count * Coop::lanes, all = op_.comm.size * args_.entries;
    if (!op_.ok()) return;
    for (int64_t i = op_.coop.index * Coop::lanes + op_.coop.lane; i < all; i += step) visit(i);
  }

  template <class Visit>
  JAX_EP_FN void for_my_words(Visit visit) const {
    for (int word = my_words_.begin + op_.coop.lane; word < my_words_.end; word += Coop::lanes) visit(word);
  }

  JAX_EP_FN void push_entries() {
    const Part sender = op_.coop.sender;
    if (!op_.may_push() || sender.empty()) return;
    op_.enter(Phase::send);
    const Range mine = part_of(args_.entries, sender.index, sender.count);
    const int64_t first_place = int64_t{op_.comm.rank} * args_.entries;
    const Window<int32_t> places(op_, kWindow<&SparseUnionArgs::places>);
    for (int first = mine.begin; first < mine.end && op_.may_push(); first += Coop::lanes) {
      const int i = first + op_.coop.lane;
      if (i >= mine.end) continue;
      const int32_t given = args_.ids[i];
      const bool exists = static_cast<uint32_t>(given) < static_cast<uint32_t>(args_.num_rows);
      const int32_t id = exists ? given : args_.num_rows;  // peers use this as an index
      for (int step = 0; step < op_.comm.size; ++step) {
        places.peer((op_.comm.rank + step) % op_.comm.size)[first_place + i] = id;
      }
    }
    op_.coop.sync();
    op_.deliver(0, 1, sender.count);
  }

  JAX_EP_FN void mark_ids() {
    for_my_entries([&](int64_t i) {
      const int id = args_.places[i];
      if (id < args_.num_rows) atomic_or(&bits_[id / 32], 1u << id % 32);
    });
  }

  JAX_EP_FN void count_ids() {
    int count = 0;
    for_my_words([&](int word) { count += count_bits(bits_[word]); });
    count = op_.coop.sum(count);
    if (op_.coop.lane == 0) coop_counts_[op_.coop.index] = count;
  }

  // Writes for every word of this coop the number of ids below it.
  JAX_EP_FN void number_ids() {
    if (!op_.ok()) return;
    int before = 0;
    for (int coop = op_.coop.lane; coop < op_.coop.index; coop += Coop::lanes) before += coop_counts_[coop];
    before = op_.coop.sum(before);
    for (int first = my_words_.begin; first < my_words_.end; first += Coop::lanes) {
      const int word = first + op_.coop.lane;
      int total = 0;
      const int offset = op_.coop.exclusive_scan(word < my_words_.end ? count_bits(bits_[word]) : 0, &total);
      if (word < my_words_.end) prefix_[word] = before + offset;
      before += total;
    }
  }

  // The place of an id, at most num_rows: the number of ids below it.
  JAX_EP_FN int ids_below(int id) const {
    return prefix_[id / 32] + count_bits(bits_[id / 32] & ((1u << id % 32) - 1));
  }

  JAX_EP_FN void write_places() {
    if (!op_.ok()) return;
    for_my_entries([&](int64_t i) { args_.places[i] = ids_below(args_.places[i]); });
    const Range range =
        args_.sharded ? row_range(args_.num_rows, op_.comm.rank, op_.comm.size) : Range{0, args_.num_rows};
    const Range mine{ids_below(range.begin), ids_below(range.end)};
    for_my_words([&](int word) {
      int place = prefix_[word];
      for (uint32_t left = bits_[word]; left; left &= left - 1, ++place)
        if (place >= mine.begin && place < mine.end && place - mine.begin < args_.capacity)
          args_.indices[place - mine.begin] = word * 32 + lowest_bit(left);
    });
    const int step = op_.coop.count * Coop::lanes;
    for (int64_t i = int64_t{mine.end} - mine.begin + op_.coop.index * Coop::lanes + op_.coop.lane; i < args_.capacity;
         i += step)
      args_.indices[i] = args_.num_rows;
    if (op_.coop.index == 0) summarise();
  }

  JAX_EP_FN void summarise() {
    for (int rank = op_.coop.lane; rank <= op_.comm.size; rank += Coop::lanes)
      args_.bounds[rank] = ids_below(row_range(args_.num_rows, rank, op_.comm.size).begin);
    for (int i = op_.coop.lane; i < kMissing; i += Coop::lanes) {
      int over_ranks = 0;
      for (int rank = 0; rank < op_.comm.size; ++rank) over_ranks += ReceivedMail(op_).ints(rank)[i];
      args_.all_missing[i] = over_ranks;
    }
  }

  Op& op_;
  const SparseUnionArgs& args_;
  const Range my_words_;
  uint32_t* const bits_;
  int32_t* const prefix_;
  int32_t* const coop_counts_;
};

template <class = NoFormat>
JAX_EP_FN void run_kernel(const Comm& comm, const SparseUnionArgs& args, const Coop& all) {
  const Coop coop = join_op(comm, all);
  Op op(comm, coop, kind_of(args));
  const Results<SparseUnionArgs> results(args, comm.size);
  if (!coop.cta.empty()) {
    op.poison(results);
    SparseUnion(op, args).run();
  }
  op.finish(results, all.count);
}

}  // namespace jax_ep
