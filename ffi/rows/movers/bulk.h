// Moves rows by Hopper's bulk copies through a coop's shared memory, so that neither latency nor a slow link holds up a
// lane. On older GPUs, and for rows that are not made of 16-byte words, rows go through registers.
//
// The shared memory of a coop begins with barriers: first those of a RowReader, then those of a RowMover. After the
// barriers come the stages of a RowMover; or the stages of a RowWriter, then those of a RowReader.
#pragma once

#include "comm/platform/ptx/bulk.h"
#include "rows/movers/plain.h"

namespace jax_ep {

constexpr int kReaderBarriers = 12, kMoverBarriers = 4;
static_assert((kReaderBarriers + kMoverBarriers) * sizeof(uint64_t) <= kBarrierBytes);

// Each phase has one arrival, and the bytes that it announces.
JAX_EP_FN void open_barrier(uint64_t* barrier) {
  ptx::init_barrier<1>(barrier);
  ptx::publish_barriers();
}

// Returns when all but the latest `pending` groups of stores of this coop's lanes are written.
JAX_EP_FN void wait_stores(const Coop& coop, int pending) {
  if (kHopper) {
    ptx::wait_stores_written_but(pending);
    ptx::proxy_fence();
  }
  coop.sync();
}

// Rows pass through a ring of stages, in parts. A row is read once, however many sinks it goes to. Each lane stores to
// one sink.
class BulkMover {
 public:
  static constexpr int kStages = kMoverBarriers;

  JAX_EP_FN explicit BulkMover(const Coop& coop)
      : coop_(coop),
        barriers_(reinterpret_cast<uint64_t*>(coop.shared) + kReaderBarriers),
        stages_(coop.shared + kBarrierBytes),
        stage_bytes_((coop.shared_bytes - kBarrierBytes) / kStages / 128 * 128) {
    if (kHopper && stage_bytes_ > 0 && coop.lane < kStages) open_barrier(&barriers_[coop.lane]);
    coop.sync();
  }

  template <class Next, class Source, class Sink, class After>
  JAX_EP_FN void move(Next next, int64_t bytes, int fanout, Source source, Sink sink, After after) {
    if (kHopper && stage_bytes_ > 0 && bytes > 0 && bytes % 16 == 0 && fanout <= Coop::lanes) {
      move_in_bulk(next, bytes, fanout, source, sink, after);
      return;
    }
    copy_rows(coop_, next, bytes, fanout, source, sink, [&](int item) { after(item, *this); });
  }

  JAX_EP_FN void acquire() const {
    ptx::proxy_fence();
    coop_.sync();
  }
  JAX_EP_FN int puts() const { return static_cast<int>(stored_); }
  JAX_EP_FN void complete_to(int puts) { wait_stores(coop_, static_cast<int>(stored_) - puts); }

 private:
  // A part of a row under way: where this lane stores it. The last part of a row carries the row's item.
  struct InFlight {
    char* to;
    uint32_t bytes;  // 0: there are no more
    int item;
  };

  template <class Next, class Source, class Sink, class After>
  JAX_EP_FN void move_in_bulk(Next next, int64_t bytes, int fanout, Source source, Sink sink, After after) {
    ptx::proxy_fence();
    ptx::wait_stores_read<0>();
    coop_.sync();
    const int parts = static_cast<int>((bytes + stage_bytes_ - 1) / stage_bytes_);
    const int part_bytes = static_cast<int>((bytes + parts - 1) / parts + 15) / 16 * 16;
    int item = next(), index = 0;
    const char* from = nullptr;
    char* to = nullptr;
    const auto load = [&]() -> InFlight {
      if (item < 0) return {nullptr, 0, -1};
      const uint32_t stage = loaded_++ % kStages;
      if (index == 0) {
        from = source(item);
        to = sink(item, coop_.lane);
      }
      const int64_t offset = int64_t{index} * part_bytes, left = bytes - offset;
      const uint32_t size = static_cast<uint32_t>(left < part_bytes ? left : part_bytes);
      live_ = from ? live_ | 1u << stage : live_ & ~(1u << stage);
      if (from && coop_.lane == 0) ptx::load(stages_ + stage * stage_bytes_, from + offset, size, &barriers_[stage]);
      const bool last = ++index == parts;
      const InFlight part{from && to ? to + offset : nullptr, size, last ? item : -1};
      if (last) {
        item = next();
        index = 0;
      }
      return part;
    };
    InFlight queue[kStages - 1] = {};  // the parts under way, in order
    int done = -1;
    for (int issued = 1;; ++issued) {  // one call of load() issues all parts: its code is inlined, and long
      for (int i = 0; i < kStages - 2; ++i) queue[i] = queue[i + 1];
      queue[kStages - 2] = load();
      if (done >= 0) after(done, *this);
      if (issued < kStages - 1) continue;
      const InFlight& out = queue[0];
      if (!out.bytes) break;
      const uint32_t stage = stored_++ % kStages;
      if (live_ >> stage & 1) {
        ptx::wait_barrier(&barriers_[stage], phases_ >> stage & 1);
        phases_ ^= 1u << stage;
        if (out.to) ptx::store(out.to, stages_ + stage * stage_bytes_, out.bytes);
      }
      ptx::commit_stores();
      ptx::wait_stores_read<1>();  // the stage before this one is free again
      coop_.sync();
      done = out.item;
    }
  }

  const Coop& coop_;
  uint64_t* const barriers_;
  char* const stages_;
  const int stage_bytes_;
  uint32_t loaded_ = 0, stored_ = 0;  // numbers of parts, which name the stage
  uint32_t live_ = 0, phases_ = 0;    // a bit per stage: whether it is in use; the parity of its barrier
};

// Brings batches to shared memory before they are needed.
class BulkReader {
 public:
  // `bulk` if every batch is made of 16-byte words; `writer_bytes`: of all stages of the writer.
  JAX_EP_FN BulkReader(const Coop& coop, int batch_bytes, bool bulk, int writer_bytes)
      : coop_(coop),
        barriers_(reinterpret_cast<uint64_t*>(coop.shared)),
        stages_(coop.shared + kBarrierBytes + writer_bytes),
        batch_bytes_(batch_bytes),
        stage_count_((coop.shared_bytes - kBarrierBytes - writer_bytes) / batch_bytes),
        bulk_(bulk && kHopper && stage_count_ > 0) {
    if (stage_count_ > kReaderBarriers) stage_count_ = kReaderBarriers;
    if (bulk_ && coop.lane < stage_count_) open_barrier(&barriers_[coop.lane]);
    if (bulk_) ptx::proxy_fence();
    coop.sync();
  }

  JAX_EP_FN int depth() const { return stage_count_; }
  JAX_EP_FN bool in_bulk() const { return bulk_; }

  JAX_EP_FN void acquire() {
    if (bulk_) ptx::proxy_fence();
    coop_.sync();
  }

  // Asks for `count` batches together, each lane for batch number `mine`. They are taken in the order of their numbers.
  JAX_EP_FN void ask(int mine, int count, const char* from, int bytes) {
    const int stage = wrap(ask_ + mine);
    if (mine >= 0 && mine < count) ptx::load(stages_ + stage * batch_bytes_, from, bytes, &barriers_[stage]);
    ask_ = wrap(ask_ + count);
  }
  JAX_EP_FN const char* take() {
    const int stage = take_;
    ptx::wait_barrier(&barriers_[stage], phases_ >> stage & 1);
    phases_ ^= 1u << stage;
    take_ = wrap(stage + 1);
    return stages_ + stage * batch_bytes_;
  }
  JAX_EP_FN void release() { coop_.sync(); }

 private:
  JAX_EP_FN int wrap(int stage) const { return stage >= stage_count_ ? stage - stage_count_ : stage; }

  const Coop& coop_;
  uint64_t* const barriers_;
  char* const stages_;
  const int batch_bytes_;
  int stage_count_;
  const bool bulk_;
  int ask_ = 0, take_ = 0;
  uint32_t phases_ = 0;  // a bit per stage: the parity of its barrier
};

// Batches are made in shared memory, from where bulk copies take them.
class BulkWriter {
 public:
  JAX_EP_FN BulkWriter(const Coop& coop, int batch_bytes, bool bulk, int stages)
      : coop_(coop),
        plain_(coop, batch_bytes, bulk, stages),
        batch_bytes_(batch_bytes),
        stages_(stages),
        bulk_(bulk && kHopper && coop.shared_bytes >= kBarrierBytes + stages * batch_bytes) {}

  template <class Sinks, class Fill>
  JAX_EP_FN void put(const Sinks& sinks, int64_t offset, int bytes, Fill fill) {
    if (!bulk_) return plain_.put(sinks, offset, bytes, fill);
    char* const to = stage(/*fresh=*/true);
    fill(to);
    seal();
    send(sinks, offset, bytes, to);
    commit();
  }
  template <class Sinks, class Fill>
  JAX_EP_FN void put_directly(const Sinks& sinks, int64_t offset, int bytes, Fill fill) {
    plain_.put(sinks, offset, bytes, fill);
  }

  JAX_EP_FN char* stage(bool fresh) {
    if (fresh) {
      ++put_;
      if (stages_ > 1)
        ptx::wait_stores_read<1>();
      else
        ptx::wait_stores_read<0>();
      coop_.sync();
    }
    return coop_.shared + kBarrierBytes + (stages_ > 1 ? put_ % 2 : 0) * batch_bytes_;
  }
  JAX_EP_FN void seal() const {
    ptx::shared_proxy_fence();
    coop_.sync();
  }
  template <class Sinks>
  JAX_EP_FN void send(const Sinks& sinks, int64_t offset, int bytes, const char* from) const {
    if (sinks.cached()) {
      if (char* mine = sinks.in_lanes().mine()) ptx::store(mine + offset, from, bytes);
    } else {
      for_each_term(sinks, [&](const WeightedRow<char>& sink) {
        if (coop_.lane == 0) ptx::store(sink.row + offset, from, bytes);
      });
    }
  }
  JAX_EP_FN void commit() const { ptx::commit_stores(); }

  JAX_EP_FN int puts() const { return static_cast<int>(put_); }
  JAX_EP_FN void complete_to(int puts) { wait_stores(coop_, static_cast<int>(put_) - puts); }

 private:
  const Coop& coop_;
  PlainWriter plain_;
  const int batch_bytes_, stages_;
  const bool bulk_;
  uint32_t put_ = 0;
};

}  // namespace jax_ep
