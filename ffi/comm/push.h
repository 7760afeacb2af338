// How the coops of a rank divide the rows to push, and how peers learn that a chunk is whole.
#pragma once

#include "comm/integers.h"
#include "comm/op.h"
#include "comm/tickets.h"

namespace jax_ep {

// Waits up to `patience_ns` for the item's own coop to claim the item, then claims it. Returns whether this call has
// claimed it. One lane calls. Not inlined, so arguments are values: references would force the caller's variables into
// memory.
JAX_EP_COLD_FN bool steal(uint64_t* claimed, uint64_t epoch, uint64_t patience_ns) {
  const uint64_t since = clock_ns();
  for (unsigned tries = 0; load_relaxed(claimed) != epoch; ++tries) {
    if (clock_ns() - since >= patience_ns) return atomic_exchange(claimed, epoch) != epoch;
    pause(tries);
  }
  return false;
}

// Hands out items by ticket, so that fast coops take more of them and coops that have not begun take none. A coop makes
// one PushItems per op. All lanes call together. next() may be called again after it has returned -1. A ticket stands
// for `per_ticket` neighbouring items. next() returns the first of them.
//
// `own_first` (senders only): sender i starts with item i, which the constructor claims, and then draws tickets. So a
// small op does not wait for the first ticket. When next() has returned -1 and all items are announced, the sender
// calls next_stolen() until that returns -1. It returns items of senders that have not begun. A sender that claims an
// item also checks the next one, so every item is handed out if one sender runs. With own_first, per_ticket must be 1.
class PushItems {
 public:
  JAX_EP_FN PushItems(Op& op, int items, bool own_first = false, int per_ticket = 1)
      : op_(op),
        items_(items),
        per_ticket_(per_ticket),
        own_(own_first ? smaller(items, smaller(op.coop.sender.count, kMaxClaims)) : 0),
        looked_(op.coop.sender.index),
        has_own_(own_first && looked_ < own_),
        tickets_(op, /*draws=*/!has_own_) {
    if (has_own_ && op.coop.lane == 0) claimed_before_ = atomic_exchange(&op.signal_pad->claimed[looked_], op.epoch);
    if (own_ > 0 && !has_own_) looked_ = looked_ % own_ - 1;
  }

  JAX_EP_FN int next() {
    const int item = has_own_ && !begun_ ? op_.coop.sender.index : own_ + tickets_.current() * per_ticket_;
    if (item >= items_) return -1;
    begun_ = true;
    tickets_.draw_ahead();
    return item;
  }
  // The items of next()'s ticket.
  JAX_EP_FN Range next_range() {
    const int item = next();
    return item < 0 ? Range{0, 0} : Range{item, smaller(item + per_ticket_, items_)};
  }

  // Whether another coop has stolen the item that next() returned. If so, skip the item: the other coop puts and
  // announces it. Call late, because this waits for an atomic exchange.
  JAX_EP_FN bool was_stolen(int item) const {
    return has_own_ && item == op_.coop.sender.index && op_.coop.broadcast(claimed_before_ == op_.epoch);
  }

  JAX_EP_FN int next_stolen() {
    if (own_ == 0) return -1;
    looked_ = looked_ + 1 == own_ ? 0 : looked_ + 1;
    uint64_t* const claimed = &op_.signal_pad->claimed[looked_];
    int found = 0;
    if (op_.coop.lane == 0 && load_relaxed(claimed) != op_.epoch) found = steal(claimed, op_.epoch, patience_ns_);
    patience_ns_ = 0;                                 // for all items together
    return op_.coop.broadcast(found) ? looked_ : -1;  // else its owner checks the next item
  }

 private:
  Op& op_;
  const int items_, per_ticket_, own_;  // the first `own_` items need no ticket
  int looked_;                          // checked last
  const bool has_own_;
  Tickets<&SignalPad::push_ticket> tickets_;
  bool begun_ = false;
  uint64_t claimed_before_ = 0;
  uint64_t patience_ns_ = kJoinNs;
};

// Adds the items that this coop has put to the counts of their chunks, once they are written. The coop that completes a
// count raises the chunk's flag. Items are waited for only after the next ones have started, so that the link stays
// busy. All lanes call. Rows may be passed to after() in any order, and to begun() and without_put() only in increasing
// order until finish(). `Chunks` has chunks, chunk() and chunk_of(). A row has `row_items` items.
template <class Chunks>
class Announcer {
 public:
  JAX_EP_FN Announcer(Op& op, const Chunks& chunks, int row_items = 1)
      : op_(op), chunks_(chunks), row_items_(row_items) {}

  // `items` items of `row`, or of its chunk, were put. `mover` has puts and complete_to.
  template <class Mover>
  JAX_EP_FN void after(int row, Mover& mover, int items = 1) {
    after_part(row, mover);
    const int chunk = chunks_.chunk_of(row);
    if (without_chunk_ < chunk) announce_without_put();
    chunk_ = chunk;
    put_ += items + (chunk == without_chunk_ ? without_ : 0);
    without_ = chunk == without_chunk_ ? 0 : without_;
    puts_ = mover.puts();
  }

  // The first part of `row` was put. If `row` is of another chunk than the items before, announces these. Calls may be
  // left out: after() announces them later.
  template <class Mover>
  JAX_EP_FN void after_part(int row, Mover& mover) {
    if (chunks_.chunk_of(row) != chunk_) announce(puts_, mover);
  }

  // The item of `row` needs no put. It is counted with the next put of its chunk, or before the next item of a later
  // chunk. Rows of the chunk before may still be under way, and are not waited for.
  JAX_EP_FN void without_put(int row) {
    const int chunk = chunks_.chunk_of(row);
    if (chunk != without_chunk_) announce_without_put();
    without_chunk_ = chunk;
    ++without_;
  }

  // An item of `row` was begun. This completes the item begun before it.
  template <class Mover>
  JAX_EP_FN void begun(int row, Mover& mover) {
    if (begun_ >= 0) after(begun_, mover);
    begun_ = row;
  }

  // The first part of the item that was begun last was put.
  template <class Mover>
  JAX_EP_FN void after_part_of_begun(Mover& mover) {
    if (begun_ >= 0) after_part(begun_, mover);
  }

  // Announces all items. If the op has no items, every sender announces all chunks, because it may be the only one that
  // runs.
  template <class Mover>
  JAX_EP_FN void finish(Mover& mover) {
    if (begun_ >= 0) after(begun_, mover);
    begun_ = -1;
    announce_without_put();
    announce(mover.puts(), mover);
    if (chunks_.chunk(chunks_.chunks - 1).end * row_items_ == 0)
      for (int chunk = 0; chunk < chunks_.chunks; ++chunk) op_.deliver(chunk, 0, 0);
  }

 private:
  template <class Mover>
  JAX_EP_FN void announce(int puts, Mover& mover) {
    if (put_ == 0) return;
    mover.complete_to(puts);
    deliver(chunk_, put_);
    put_ = 0;
  }
  JAX_EP_FN void announce_without_put() {
    if (without_ > 0) deliver(without_chunk_, without_);
    without_ = 0;
  }
  JAX_EP_FN void deliver(int chunk, int items) {
    const Range rows = chunks_.chunk(chunk);
    op_.deliver(chunk, items, (rows.end - rows.begin) * row_items_);
  }

  Op& op_;
  const Chunks& chunks_;
  const int row_items_;
  int chunk_ = 0, put_ = 0, begun_ = -1;
  int puts_ = 0;                         // mover.puts() after the items in put_
  int without_chunk_ = 0, without_ = 0;  // items of a chunk that need no put, and are not counted yet
};

}  // namespace jax_ep
