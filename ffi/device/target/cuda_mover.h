// RowMover by Hopper's bulk copies: rows pass through a ring of stages in a team's shared memory, in pieces, and are
// read once however many places they go to. Each lane stores to one place. Rows that are not made of 16-byte words, and
// older GPUs, go through registers.
#pragma once

#define JAX_EP_OWN_MOVER
#include "device/target/cuda_bulk.h"
#include "device/target/plain_mover.h"

namespace jax_ep {

class RowMover {
 public:
  static constexpr int kStages = 3;
  static constexpr int kBarrierBytes = 128;

  JAX_EP_FN explicit RowMover(const Team& team)
      : team_(team),
        barriers_(reinterpret_cast<uint64_t*>(team.shared)),
        stages_(team.shared + kBarrierBytes),
        stage_bytes_((team.shared_bytes - kBarrierBytes) / kStages / 128 * 128) {
    if (bulk::kAvailable && stage_bytes_ > 0 && team.lane < kStages) bulk::init_barrier(&barriers_[team.lane]);
    team.sync();
  }

  template <class Source, class Sink, class After>
  JAX_EP_FN void move(Stride places, int64_t bytes, int fanout, Source source, Sink sink, After after) {
    if (bulk::kAvailable && stage_bytes_ > 0 && bytes % 16 == 0 && fanout <= Team::lanes) {
      move_in_bulk(places, bytes, fanout, source, sink, after);
      return;
    }
    copy_rows(team_, places, bytes, fanout, source, sink, [&](int place) { after(place, *this); });
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
  struct Piece {
    int place, index;
  };

  template <class Source, class Sink, class After>
  JAX_EP_FN void move_in_bulk(Stride places, int64_t bytes, int fanout, Source source, Sink sink, After after) {
    bulk::proxy_fence();
    bulk::wait_read<0>();
    team_.sync();
    pieces_ = static_cast<int>((bytes + stage_bytes_ - 1) / stage_bytes_);
    const int piece_bytes = static_cast<int>((bytes + pieces_ - 1) / pieces_ + 15) / 16 * 16;
    const auto size = [&](int piece) {
      const int64_t left = bytes - int64_t{piece} * piece_bytes;
      return static_cast<uint32_t>(left < piece_bytes ? left : piece_bytes);
    };
    const auto next = [&](Piece& piece) {
      if (++piece.index == pieces_) piece = {piece.place + places.step, 0};
    };
    Piece in{places.begin, 0};
    const char* from = nullptr;
    char* to = nullptr;
    char* queue[kStages - 1];  // where the pieces under way go, in order
    const auto load = [&] {
      if (in.place >= places.end) return;
      const uint32_t stage = loaded_++ % kStages;
      if (in.index == 0) from = source(in.place);
      live_ = from ? live_ | 1u << stage : live_ & ~(1u << stage);
      if (from && team_.lane == 0)
        bulk::load(stages_ + stage * stage_bytes_, from + int64_t{in.index} * piece_bytes, size(in.index),
                   &barriers_[stage]);
      if (in.index == 0) to = sink(in.place, team_.lane);
      next(in);
    };
    for (int i = 0; i < kStages - 1; ++i) {
      load();
      queue[i] = to;
    }
    for (Piece out{places.begin, 0}; out.place < places.end; next(out)) {
      const uint32_t stage = stored_++ % kStages;
      if (live_ >> stage & 1) {
        bulk::wait_load(&barriers_[stage], phases_ >> stage & 1);
        phases_ ^= 1u << stage;
        if (queue[0])
          bulk::store(queue[0] + int64_t{out.index} * piece_bytes, stages_ + stage * stage_bytes_, size(out.index));
      }
      bulk::commit();
      bulk::wait_read<1>();  // the stage before this one is free again
      team_.sync();
      load();
      for (int i = 0; i < kStages - 2; ++i) queue[i] = queue[i + 1];
      queue[kStages - 2] = to;
      if (out.index == pieces_ - 1) after(out.place, *this);
    }
  }

  const Team& team_;
  uint64_t* const barriers_;
  char* const stages_;
  const int stage_bytes_;
  int pieces_ = 1;
  uint32_t loaded_ = 0, stored_ = 0;  // of all pieces: they name the stage
  uint32_t live_ = 0, phases_ = 0;    // a bit per stage: something is in it; the parity of its barrier
};

}  // namespace jax_ep
