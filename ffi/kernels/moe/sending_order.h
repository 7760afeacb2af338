// In which order items are sent: by bins, a counting sort by whichever coops are free, by ticket. Used where a product
// makes the rows that are sent, or waits for them.
#pragma once

#include "comm/integers.h"
#include "comm/op.h"
#include "kernels/moe/dot_args.h"

namespace jax_ep {

// A coop makes one when the words are clear. Each step ends when all coops that take part in it have done their share,
// or the op has failed; whoever comes late finds nothing left to do. Waits are for coops that are at work.
class SendingOrder {
 public:
  JAX_EP_FN SendingOrder(Op& op, uint64_t* words, SortWords at, int items)
      : op_(op), words_(words), at_(at), items_(items), bins_(words + at.items()) {}

  // Counts the items of each bin: bin_of(item), asked for by a lane.
  template <class BinOf>
  JAX_EP_FN void count(BinOf bin_of) const {
    if (items_ == 0 || !op_.ok()) return;
    op_.enter(Phase::layout);
    uint64_t* const counted = words_ + at_.counts();
    each_part(words_ + at_.tickets(), [&](Range part) {
      for (int i = part.begin + op_.coop.lane; i < part.end; i += Coop::lanes) draw(&bins_[bin_of(i)]);
      if (is_last(counted, part.end - part.begin)) {
        sum_up();
        op_.note(counted, true);
      }
    });
    op_.wait_noted(counted);
  }

  // Then puts each item in its position, put(position, item). All lanes call put together, with position -1 for none.
  // All that was put is seen by whoever returns, if the op has not failed.
  template <class BinOf, class Put>
  JAX_EP_FN void put(BinOf bin_of, Put put) const {
    if (items_ == 0 || !op_.ok()) return;
    op_.enter(Phase::layout);
    uint64_t* const done = words_ + at_.counts() + 1;
    each_part(words_ + at_.tickets() + 1, [&](Range part) {
      for (int first = part.begin; first < part.end; first += Coop::lanes) {
        const int i = first + op_.coop.lane;
        put(i < part.end ? static_cast<int>(draw(&bins_[bin_of(i)])) : -1, i);
      }
      op_.coop.sync();
      if (op_.coop.lane == 0) op_.note_when_whole(done, part.end - part.begin, items_);
    });
    op_.wait_noted(done);
  }

 private:
  static constexpr int kPartItems = Coop::lanes == 1 ? 64 : 4 * Coop::lanes;  // that a coop takes at a time

  template <class Visit>
  JAX_EP_FN void each_part(uint64_t* tickets, Visit visit) const {
    for (;;) {
      const int part = op_.coop.broadcast(op_.coop.lane == 0 ? static_cast<int>(draw(tickets)) : 0);
      if (part >= ceil_div(items_, kPartItems)) return;
      visit(Range{part * kPartItems, smaller((part + 1) * kPartItems, items_)});
    }
  }

  JAX_EP_FN bool is_last(uint64_t* counted, int share) const {
    op_.coop.sync();
    int last = 0;
    if (op_.coop.lane == 0)
      last = fetch_add(counted, static_cast<uint64_t>(share)) + share == static_cast<uint64_t>(items_);
    last = op_.coop.broadcast(last);
    op_.coop.sync();
    return last;
  }

  // From the items of each bin to where it begins.
  JAX_EP_FN void sum_up() const {
    int start = 0;
    for (int first = 0; first < at_.bins; first += Coop::lanes) {
      const int bin = first + op_.coop.lane;
      const int items = bin < at_.bins ? static_cast<int>(load_relaxed(&bins_[bin])) : 0;
      int total = 0;
      const int before = op_.coop.exclusive_scan(items, &total);
      if (bin < at_.bins) store_relaxed(&bins_[bin], static_cast<uint64_t>(start + before));
      start += total;
    }
    op_.coop.sync();
  }

  Op& op_;
  uint64_t* const words_;
  const SortWords at_;
  const int items_;
  uint64_t* const bins_;
};

}  // namespace jax_ep
