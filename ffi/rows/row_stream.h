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

// A job has some rows, which are read part by part, and the sinks of the result.
template <class Row, class Sinks>
class RowStream {
 public:
  // `writer_bytes`: shared memory of a writer that works at the same time.
  JAX_EP_FN RowStream(const Coop& coop, int stage_bytes, bool bulk, int writer_bytes)
      : reader_(coop, stage_bytes, bulk, writer_bytes), free_(reader_.depth()) {}

  JAX_EP_FN bool in_bulk() const { return reader_.in_bulk(); }
  JAX_EP_FN void acquire() { reader_.acquire(); }

  // A job begins in three steps: ask_for() requests its rows, finish() ends the job before, begin() starts the job.
  // Between ask_for() and begin() the caller may wait for something, while the rows are under way.
  JAX_EP_FN void ask_for(const LaneTerms<const Row>& rows, Cut cut) {
    then_ = {reinterpret_cast<const char*>(rows.mine()), rows.before(), rows.present(), 0, 0, cut};
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
    now_ = then_ = {};
    while (free_ + taken_ < reader_.depth()) take();
    if (begun_bytes_) release();
    begun_bytes_ = 0;
  }

  // The next batch. The order is: the first part of every row, the second part of every row, and so on.
  JAX_EP_FN const char* take() {
    ++taken_;
    return reader_.take();
  }
  // Whether a release is due: because no further batch comes before it, or soon none will.
  JAX_EP_FN bool spent() const { return reader_.depth() < 4 || free_ + taken_ == reader_.depth(); }

  // The caller has read all batches that it took.
  JAX_EP_FN void release() {
    reader_.release();
    free_ += taken_;
    taken_ = 0;
    ask();
  }

 private:
  // The requests of a job. This lane has one of its rows, the `number`-th, or none. `row` and `offset` say which batch
  // comes next.
  struct Asked {
    const char* mine = nullptr;
    int number = 0, rows = 0, row = 0, offset = 0;
    Cut cut{0, 0};
  };

  JAX_EP_FN bool done(const Asked& job) const { return job.rows == 0 || job.offset >= job.cut.row_bytes; }

  JAX_EP_FN void ask() {
    for (;;) {
      if (done(now_)) {
        now_ = then_;
        then_ = {};
      }
      if (free_ == 0 || done(now_)) return;
      const int count = smaller(free_, now_.rows - now_.row);
      const int bytes = smaller(now_.cut.batch_bytes, now_.cut.row_bytes - now_.offset);
      const int mine = now_.mine ? now_.number - now_.row : -1;
      reader_.ask(mine, count, now_.mine + now_.offset, bytes);
      free_ -= count;
      now_.row += count;
      if (now_.row < now_.rows) continue;
      now_.row = 0;
      now_.offset += now_.cut.batch_bytes;
    }
  }

  RowReader reader_;
  int free_, taken_ = 0;
  Asked now_, then_;
  LaneTerms<const Row> rows_;
  Sinks sinks_;
  int begun_bytes_ = 0;  // of a row of the job that was begun
};

}  // namespace jax_ep
