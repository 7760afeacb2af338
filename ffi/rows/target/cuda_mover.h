// RowMover by Hopper's bulk copies: rows pass through a ring of stages in a team's shared memory, in pieces, and are
// read once however many places they go to. Each lane stores to one place. Rows that are not made of 16-byte words, and
// older GPUs, go through registers.
#pragma once

#define JAX_EP_OWN_MOVER
#include "comm/target/cuda_bulk.h"
#include "rows/target/plain_mover.h"

namespace jax_ep {

class RowMover {
 public:
  static constexpr int kStages = bulk::kMoverBarriers;

  JAX_EP_FN explicit RowMover(const Team& team)
      : team_(team),
        barriers_(reinterpret_cast<uint64_t*>(team.shared) + bulk::kReaderBarriers),
        stages_(team.shared + kBarrierBytes),
        stage_bytes_((team.shared_bytes - kBarrierBytes) / kStages / 128 * 128) {
    if (bulk::kAvailable && stage_bytes_ > 0 && team.lane < kStages) bulk::init_barrier(&barriers_[team.lane]);
    team.sync();
  }

  template <class Next, class Source, class Sink, class After>
  JAX_EP_FN void move(Next next, int64_t bytes, int fanout, Source source, Sink sink, After after) {
    if (bulk::kAvailable && stage_bytes_ > 0 && bytes > 0 && bytes % 16 == 0 && fanout <= Team::lanes) {
      move_in_bulk(next, bytes, fanout, source, sink, after);
      return;
    }
    copy_rows(team_, next, bytes, fanout, source, sink, [&](int place) { after(place, *this); });
  }

  JAX_EP_FN int mark() const { return static_cast<int>(stored_); }
  JAX_EP_FN void complete_to(int mark) {
    if (bulk::kAvailable) {
      bulk::wait_written_but(static_cast<int>(stored_) - mark);
      bulk::proxy_fence();
    }
    team_.sync();
  }

 private:
  // A piece of a row on its way: where this lane stores it, and the row's place, behind its last piece.
  struct Piece {
    char* to;
    uint32_t bytes;  // 0: there are no more
    int place;
  };

  template <class Next, class Source, class Sink, class After>
  JAX_EP_FN void move_in_bulk(Next next, int64_t bytes, int fanout, Source source, Sink sink, After after) {
    bulk::proxy_fence();
    bulk::wait_read<0>();
    team_.sync();
    const int pieces = static_cast<int>((bytes + stage_bytes_ - 1) / stage_bytes_);
    const int piece_bytes = static_cast<int>((bytes + pieces - 1) / pieces + 15) / 16 * 16;
    int place = next(), index = 0;
    const char* from = nullptr;
    char* to = nullptr;
    const auto load = [&]() -> Piece {
      if (place < 0) return {nullptr, 0, -1};
      const uint32_t stage = loaded_++ % kStages;
      if (index == 0) {
        from = source(place);
        to = sink(place, team_.lane);
      }
      const int64_t offset = int64_t{index} * piece_bytes, left = bytes - offset;
      const uint32_t size = static_cast<uint32_t>(left < piece_bytes ? left : piece_bytes);
      live_ = from ? live_ | 1u << stage : live_ & ~(1u << stage);
      if (from && team_.lane == 0) bulk::load(stages_ + stage * stage_bytes_, from + offset, size, &barriers_[stage]);
      const bool last = ++index == pieces;
      const Piece piece{from && to ? to + offset : nullptr, size, last ? place : -1};
      if (last) {
        place = next();
        index = 0;
      }
      return piece;
    };
    Piece queue[kStages - 1];  // the pieces under way, in order
    for (int i = 0; i < kStages - 1; ++i) queue[i] = load();
    while (queue[0].bytes) {
      const Piece out = queue[0];
      const uint32_t stage = stored_++ % kStages;
      if (live_ >> stage & 1) {
        bulk::wait_load(&barriers_[stage], phases_ >> stage & 1);
        phases_ ^= 1u << stage;
        if (out.to) bulk::store(out.to, stages_ + stage * stage_bytes_, out.bytes);
      }
      bulk::commit();
      bulk::wait_read<1>();  // the stage before this one is free again
      team_.sync();
      for (int i = 0; i < kStages - 2; ++i) queue[i] = queue[i + 1];
      queue[kStages - 2] = load();
      if (out.place >= 0) after(out.place, *this);
    }
  }

  const Team& team_;
  uint64_t* const barriers_;
  char* const stages_;
  const int stage_bytes_;
  uint32_t loaded_ = 0, stored_ = 0;  // of all pieces: they name the stage
  uint32_t live_ = 0, phases_ = 0;    // a bit per stage: something is in it; the parity of its barrier
};

}  // namespace jax_ep
