// Pushing, shared among the teams of a rank: where a peer's buffer is, who takes which item, and how the peers learn of
// a chunk.
#pragma once

#include "comm/layout.h"
#include "comm/op.h"

namespace jax_ep {

// One buffer of every peer, as it stands in the mail: each lane keeps that of one peer, where there are lanes enough.
class PeerBuffer {
 public:
  // `index` in the mail, which must be here.
  JAX_EP_FN PeerBuffer(const Op& op, int index) : op_(op), index_(index), mine_(nullptr) {
    if (in_lanes() && op.team.lane < op.comm.size) mine_ = in_mail(op.team.lane);
  }

  // All lanes ask together, each for a rank of its own; null for a rank below zero.
  JAX_EP_FN char* of(int rank) const {
    if (!in_lanes()) return rank < 0 ? nullptr : in_mail(rank);
    char* buffer = op_.team.from_lane(mine_, larger(rank, 0));
    return rank < 0 ? nullptr : buffer;
  }

 private:
  JAX_EP_FN bool in_lanes() const { return Team::lanes > 1 && op_.comm.size <= Team::lanes; }
  JAX_EP_FN char* in_mail(int rank) const { return static_cast<char*>(op_.mail_from(rank)->buffers[index_]); }

  const Op& op_;
  const int index_;
  char* mine_;
};

// Hands out items in order, to whoever is free: links and processors are not equally fast, and some teams may not have
// begun. The first is asked for where this is made. With `by_place` the first item of a pushing team is its own index,
// and only further ones are asked for: that saves a tenth of the time of few tokens, but every pushing team must begin.
class PushItems {
 public:
  JAX_EP_FN PushItems(Op& op, int items, bool by_place = false)
      : op_(op), items_(items), by_place_(by_place ? op.team.pusher.count : 0), begun_(!by_place) {
    if (begun_) asked_ = op.ask_for_push_ticket();
  }

  // The next item of this team, or -1.
  JAX_EP_FN int next() {
    const int item = begun_ ? by_place_ + op_.take_ticket(asked_) : op_.team.pusher.index;
    if (item >= items_) return -1;
    begun_ = true;
    asked_ = op_.ask_for_push_ticket();
    return item;
  }

 private:
  Op& op_;
  const int items_, by_place_;
  uint64_t asked_ = 0;
  bool begun_;
};

// Counts the items that this team has put, and tells when those of a chunk are written: when the next are already on
// their way, so that the wire does not run dry.
template <class Chunks>
class Announcer {
 public:
  // A token consists of `parts` items.
  JAX_EP_FN Announcer(Op& op, const Chunks& chunks, int parts = 1) : op_(op), chunks_(chunks), parts_(parts) {}

  // An item of `token` was put. `rows` has mark and complete_to.
  template <class Rows>
  JAX_EP_FN void after(int token, Rows& rows) {
    const int chunk = chunks_.chunk_of(token);
    if (chunk != chunk_) announce(written_, rows);
    chunk_ = chunk;
    ++put_;
    written_ = rows.mark();
  }

  // An item of `token` was begun, which completes the item begun before it.
  template <class Rows>
  JAX_EP_FN void begun(int token, Rows& rows) {
    if (begun_ >= 0) after(begun_, rows);
    begun_ = token;
  }

  // An item of `token` sends nothing. An item that was begun in another chunk is finished first, by rows.finish().
  template <class Rows>
  JAX_EP_FN void skipped(int token, Rows& rows) {
    if (begun_ >= 0 && chunks_.chunk_of(token) != chunk_) {
      rows.finish();
      after(begun_, rows);
      begun_ = -1;
    }
    after(token, rows);
  }

  // Everything was put. If there are no items at all, one team announces all chunks.
  template <class Rows>
  JAX_EP_FN void finish(Rows& rows) {
    if (begun_ >= 0) after(begun_, rows);
    announce(rows.mark(), rows);
    if (chunks_.chunk(chunks_.chunks - 1).end * parts_ == 0 && op_.team.pusher.index == 0)
      for (int chunk = 0; chunk < chunks_.chunks; ++chunk) op_.deliver(chunk, 0, 0);
  }

 private:
  template <class Rows>
  JAX_EP_FN void announce(int mark, Rows& rows) {
    if (put_ == 0) return;
    rows.complete_to(mark);
    const Range tokens = chunks_.chunk(chunk_);
    op_.deliver(chunk_, put_, (tokens.end - tokens.begin) * parts_);
    put_ = 0;
  }

  Op& op_;
  const Chunks& chunks_;
  const int parts_;
  int chunk_ = 0, put_ = 0, written_ = 0, begun_ = -1;
};

}  // namespace jax_ep
