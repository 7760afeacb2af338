// RowReader and RowWriter by Hopper's bulk copies: batches come to shared memory before they are needed and leave from
// there on their own, so that neither latency nor a slow link holds up a lane.
//
// A team's shared memory: barriers, the writer's stages, the reader's stages.
#pragma once

#define JAX_EP_OWN_STREAMS
#include "comm/target/cuda_bulk.h"
#include "rows/target/plain_streams.h"

namespace jax_ep {

class RowReader {
 public:
  // `bulk` if every batch is made of 16-byte words; `writer_bytes`: of all stages of the writer.
  JAX_EP_FN RowReader(const Team& team, int batch_bytes, bool bulk, int writer_bytes)
      : team_(team),
        barriers_(reinterpret_cast<uint64_t*>(team.shared)),
        stages_(team.shared + kBarrierBytes + writer_bytes),
        batch_bytes_(batch_bytes),
        stage_count_((team.shared_bytes - kBarrierBytes - writer_bytes) / batch_bytes),
        bulk_(bulk && bulk::kAvailable && stage_count_ > 0) {
    if (stage_count_ > bulk::kReaderBarriers) stage_count_ = bulk::kReaderBarriers;
    if (bulk_ && team.lane < stage_count_) bulk::init_barrier(&barriers_[team.lane]);
    if (bulk_) bulk::proxy_fence();
    team.sync();
  }

  JAX_EP_FN int depth() const { return stage_count_; }
  JAX_EP_FN bool in_bulk() const { return bulk_; }

  JAX_EP_FN void acquire() {
    if (bulk_) bulk::proxy_fence();
    team_.sync();
  }

  // Lanes ask for `count` batches, which are taken in the order of their numbers `mine`, from 0 on.
  JAX_EP_FN void ask(int mine, int count, const char* from, int bytes) {
    const int stage = wrap(ask_ + mine);
    if (mine >= 0 && mine < count) bulk::load(stages_ + stage * batch_bytes_, from, bytes, &barriers_[stage]);
    ask_ = wrap(ask_ + count);
  }
  JAX_EP_FN const char* take() {
    const int stage = take_;
    bulk::wait_load(&barriers_[stage], phases_ >> stage & 1);
    phases_ ^= 1u << stage;
    take_ = wrap(stage + 1);
    return stages_ + stage * batch_bytes_;
  }
  // All that was taken has been looked at.
  JAX_EP_FN void release() { team_.sync(); }

 private:
  JAX_EP_FN int wrap(int stage) const { return stage >= stage_count_ ? stage - stage_count_ : stage; }

  const Team& team_;
  uint64_t* const barriers_;
  char* const stages_;
  const int batch_bytes_;
  int stage_count_;
  const bool bulk_;
  int ask_ = 0, take_ = 0;
  uint32_t phases_ = 0;  // a bit per stage: the parity of its barrier
};

class RowWriter {
 public:
  // Of one stage or two.
  JAX_EP_FN RowWriter(const Team& team, int batch_bytes, bool bulk, int stages)
      : team_(team),
        plain_(team, batch_bytes, bulk, stages),
        batch_bytes_(batch_bytes),
        stages_(stages),
        bulk_(bulk && bulk::kAvailable && team.shared_bytes >= kBarrierBytes + stages * batch_bytes) {}

  template <class Places, class Fill>
  JAX_EP_FN void put(const Places& places, int64_t offset, int bytes, Fill fill) {
    if (!bulk_) return plain_.put(places, offset, bytes, fill);
    char* const to = stage(/*fresh=*/true);
    fill(to);
    seal();
    send(places, offset, bytes, to);
    commit();
  }
  template <class Places, class Fill>
  JAX_EP_FN void put_directly(const Places& places, int64_t offset, int bytes, Fill fill) {
    plain_.put(places, offset, bytes, fill);
  }

  JAX_EP_FN char* stage(bool fresh) {
    if (fresh) {
      ++put_;
      if (stages_ > 1)
        bulk::wait_read<1>();
      else
        bulk::wait_read<0>();
      team_.sync();
    }
    return team_.shared + kBarrierBytes + (stages_ > 1 ? put_ % 2 : 0) * batch_bytes_;
  }
  JAX_EP_FN void seal() const {
    bulk::shared_proxy_fence();
    team_.sync();
  }
  template <class Places>
  JAX_EP_FN void send(const Places& places, int64_t offset, int bytes, const char* from) const {
    if (places.cached()) {
      if (char* mine = places.held().mine()) bulk::store(mine + offset, from, bytes);
    } else {
      auto walk = places.walk();
      for (char* place = walk.next().row; place; place = walk.next().row)
        if (team_.lane == 0) bulk::store(place + offset, from, bytes);
    }
  }
  JAX_EP_FN void commit() const { bulk::commit(); }

  JAX_EP_FN int mark() const { return static_cast<int>(put_); }
  JAX_EP_FN void complete_to(int mark) {
    if (bulk::kAvailable) {
      bulk::wait_written_but(static_cast<int>(put_) - mark);
      bulk::proxy_fence();
    }
    team_.sync();
  }

 private:
  const Team& team_;
  PlainWriter plain_;
  const int batch_bytes_, stages_;
  const bool bulk_;
  uint32_t put_ = 0;
};

}  // namespace jax_ep
