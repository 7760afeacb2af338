// RowMover by Hopper's bulk copies: one lane drives a ring of stages in shared memory, and a row is read once however
// many places it goes to. Rows that are not made of 16-byte words, and older GPUs, go through registers.
#pragma once

#include "device/copy.h"
#include "device/target/cuda_bulk.h"

namespace jax_ep {

class RowMover {
 public:
  static constexpr int kStages = 3;

  JAX_EP_FN explicit RowMover(const Team& team)
      : team_(team),
        barriers_(reinterpret_cast<uint64_t*>(team.shared)),
        stages_(team.shared + 128),
        stage_bytes_((team.shared_bytes - 128) / kStages / 128 * 128) {
    if constexpr (bulk::kAvailable) {
      if (team.lane < kStages && stage_bytes_ > 0) bulk::init_barrier(&barriers_[team.lane]);
    }
    team.sync();
  }

  template <class Source, class Sinks, class After>
  JAX_EP_FN void move(Stride places, int64_t bytes, Source source, Sinks sinks, After after) {
    if constexpr (bulk::kAvailable) {
      if (stage_bytes_ > 0 && bytes % 16 == 0) {
        if (team_.lane == 0) move_in_bulk(places, bytes, source, sinks, after);
        team_.sync();
        return;
      }
    }
    for (int i = places.begin; i < places.end; i += places.step) {
      if (const char* from = source(i)) sinks(i, [&](char* to) { copy_row(team_, to, from, bytes); });
      team_.sync();
      after(i, *this);
    }
  }

  JAX_EP_FN void complete(int pending) {
    if constexpr (bulk::kAvailable) {
      pending *= pieces_;
      if (pending >= 4)
        bulk::wait_written<4>();
      else if (pending >= 2)
        bulk::wait_written<2>();
      else if (pending == 1)
        bulk::wait_written<1>();
      else
        bulk::wait_written<0>();
      bulk::proxy_fence();
    }
  }

 private:
  // Walks through the pieces of the rows that have a source; `place` runs past the end when there are none left.
  template <class Source>
  struct Cursor {
    Stride places;
    int pieces;
    Source source;
    int place, piece;
    const char* from;

    JAX_EP_FN Cursor(Stride places, int pieces, Source source)
        : places(places), pieces(pieces), source(source), place(places.begin), piece(0), from(nullptr) {
      find();
    }
    JAX_EP_FN bool more() const { return place < places.end; }
    JAX_EP_FN void next() {
      if (++piece < pieces) return;
      piece = 0;
      place += places.step;
      find();
    }
    JAX_EP_FN void find() {
      for (; place < places.end; place += places.step)
        if ((from = source(place))) return;
    }
  };

  template <class Source, class Sinks, class After>
  JAX_EP_FN void move_in_bulk(Stride places, int64_t bytes, Source source, Sinks sinks, After after) {
    bulk::proxy_fence();
    pieces_ = static_cast<int>((bytes + stage_bytes_ - 1) / stage_bytes_);
    const int piece_bytes = static_cast<int>((bytes + pieces_ - 1) / pieces_ + 15) / 16 * 16;
    const auto size = [&](int piece) {
      const int64_t left = bytes - int64_t{piece} * piece_bytes;
      return static_cast<uint32_t>(left < piece_bytes ? left : piece_bytes);
    };
    Cursor<Source> loads(places, pieces_, source), stores(places, pieces_, source);
    bulk::wait_read<0>();
    const auto load = [&] {
      if (!loads.more()) return;
      const int stage = loaded_++ % kStages;
      bulk::load(stages_ + stage * stage_bytes_, loads.from + int64_t{loads.piece} * piece_bytes, size(loads.piece),
                 &barriers_[stage]);
      loads.next();
    };
    for (int i = 0; i < kStages - 1; ++i) load();
    while (stores.more()) {
      const int stage = stored_ % kStages, piece = stores.piece, place = stores.place;
      bulk::wait_load(&barriers_[stage], stored_ / kStages % 2);
      sinks(place, [&](char* to) {
        bulk::store(to + int64_t{piece} * piece_bytes, stages_ + stage * stage_bytes_, size(piece));
      });
      bulk::commit();
      ++stored_;
      stores.next();
      bulk::wait_read<1>();  // the stage before this one is free again
      load();
      if (piece == pieces_ - 1) after(place, *this);
    }
  }

  const Team& team_;
  uint64_t* const barriers_;
  char* const stages_;
  const int stage_bytes_;
  int pieces_ = 1;
  uint32_t loaded_ = 0, stored_ = 0;
};

}  // namespace jax_ep
