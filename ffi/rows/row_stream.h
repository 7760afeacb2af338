// Brings rows in batches, job after job. During a job, the batches of the next one are under way.
#pragma once

#include "comm/integers.h"
#include "rows/movers.h"
#include "rows/terms.h"

namespace jax_ep {

// How rows are cut into batches.
struct Cut {
  int row_bytes, batch_bytes;
};

// `count` batches, of which this lane's `mine`-th is at `from`; see RowReader::ask.
struct Batches {
  int mine, count;
  const char* from;
  int bytes;
};

// The batches of a job's rows that are not asked for yet: the first part of every row, the second part of every row,
// and so on. This lane has one of the rows, the `number`-th, or none.
class RowRequests {
 public:
  RowRequests() = default;
  template <class Row>
  JAX_EP_FN RowRequests(const LaneTerms<const Row>& rows, Cut cut)
      : mine_(reinterpret_cast<const char*>(rows.mine())), number_(rows.before()), rows_(rows.present()), cut_(cut) {}

  JAX_EP_FN bool done() const { return rows_ == 0 || offset_ >= cut_.row_bytes; }
  // At most `most` batches that come next.
  JAX_EP_FN Batches next(int most) {
    const int count = smaller(most, rows_ - row_);
    const int bytes = smaller(cut_.batch_bytes, cut_.row_bytes - offset_);
    const Batches batches{mine_ ? number_ - row_ : -1, count, mine_ + offset_, bytes};
    row_ += count;
    if (row_ < rows_) return batches;
    row_ = 0;
    offset_ += cut_.batch_bytes;
    return batches;
  }

 private:
  const char* mine_ = nullptr;
  int number_ = 0, rows_ = 0, row_ = 0, offset_ = 0;
  Cut cut_{0, 0};
};

// A job has some rows, which are read part by part, and the sinks of the result. `Requests`: the order of the batches.
template <class Row, class Sinks, class Requests = RowRequests>
class RowStream {
 public:
  // `writer_bytes`: shared memory of a writer that works at the same time.
  JAX_EP_FN RowStream(const Coop& coop, int stage_bytes, bool bulk, int writer_bytes)
      : reader_(coop, stage_bytes, bulk, writer_bytes), free_(reader_.depth()), rows_(coop), sinks_(coop) {}

  JAX_EP_FN bool in_bulk() const { return reader_.in_bulk(); }
  JAX_EP_FN void acquire() { reader_.acquire(); }

  // A job begins in three steps: ask_for() requests its rows, finish() ends the job before, begin() starts the job.
  // Between ask_for() and begin() the caller may wait for something, while the rows are under way.
  JAX_EP_FN void ask_for(const LaneTerms<const Row>& rows, Cut cut) {
    then_ = Requests(rows, cut);
    ask();
  }
  JAX_EP_FN void begin(const LaneTerms<const Row>& rows, const Sinks& sinks, Cut cut) {
    rows_ = rows;
    sinks_ = sinks;
    begun_bytes_ = cut.row_bytes;
  }

  // Does the last job by work(rows, sinks, row_bytes). The work is inlined, and long, so a loop should call finish() in
  // one place.
  template <class Work>
  JAX_EP_FN void finish(Work work) {
    if (begun_bytes_) work(rows_, sinks_, begun_bytes_);
    begun_bytes_ = 0;
  }

  // Forgets the last job.
  JAX_EP_FN void drop() {
    now_ = then_ = Requests();
    while (free_ + taken_ < reader_.depth()) take();
    if (begun_bytes_) release();
    begun_bytes_ = 0;
  }

  // The next batch.
  JAX_EP_FN const char* take() {
    ++taken_;
    return reader_.take();
  }
  // Whether a release is due: because no further batch comes before it, or soon none will.
  JAX_EP_FN bool spent() const { return reader_.depth() < 4 || free_ + taken_ == reader_.depth(); }

  JAX_EP_FN int taken() const { return taken_; }  // batches that are to be released

  // The caller has read all batches that it took.
  JAX_EP_FN void release() {
    reader_.release();
    free_ += taken_;
    taken_ = 0;
    ask();
  }

 private:
  JAX_EP_FN void ask() {
    for (;;) {
      if (now_.done()) {
        now_ = then_;
        then_ = Requests();
      }
      if (free_ == 0 || now_.done()) return;
      const Batches batches = now_.next(free_);
      reader_.ask(batches.mine, batches.count, batches.from, batches.bytes);
      free_ -= batches.count;
    }
  }

  RowReader reader_;
  int free_, taken_ = 0;
  Requests now_, then_;  // of the job that is read, and of the one after it
  LaneTerms<const Row> rows_;
  Sinks sinks_;
  int begun_bytes_ = 0;  // of a row of the job that was begun
};

}  // namespace jax_ep
