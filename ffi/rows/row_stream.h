// Rows that come in batches, one job after another: while a job is done, the batches of the next are on their way.
#pragma once

#include "comm/layout.h"
#include "rows/lineup.h"
#include "rows/movers.h"

namespace jax_ep {

// How rows are cut into batches.
struct Cut {
  int row_bytes, batch_bytes;
};

// A job is some rows, all taken part by part, and the places of what becomes of them.
template <class Row, class Places>
class RowStream {
 public:
  // `writer_bytes`: of a writer beside it.
  JAX_EP_FN RowStream(const Team& team, int stage_bytes, bool bulk, int writer_bytes)
      : reader_(team, stage_bytes, bulk, writer_bytes), free_(reader_.depth()) {}

  JAX_EP_FN bool in_bulk() const { return reader_.in_bulk(); }
  JAX_EP_FN void acquire() { reader_.acquire(); }

  // Begins a job, and does the one before by work(rows, places, row_bytes). places_of() may wait: the rows are under
  // way.
  template <class PlacesOf, class Work>
  JAX_EP_FN void begin_for(const Held<const Row>& rows, PlacesOf places_of, Cut cut, Work work) {
    then_ = {reinterpret_cast<const char*>(rows.mine()), rows.before(), rows.present(), 0, 0, cut};
    ask();
    finish(work);
    rows_ = rows;
    places_ = places_of();
    begun_bytes_ = cut.row_bytes;
  }

  template <class Work>
  JAX_EP_FN void begin(const Held<const Row>& rows, const Places& places, Cut cut, Work work) {
    begin_for(rows, [&] { return places; }, cut, work);
  }

  // Does the last job.
  template <class Work>
  JAX_EP_FN void finish(Work work) {
    if (begun_bytes_) work(rows_, places_, begun_bytes_);
    begun_bytes_ = 0;
  }

  // Forgets the last job.
  JAX_EP_FN void drop() {
    now_ = then_ = {};
    while (free_ + taken_ < reader_.depth()) take();
    if (begun_bytes_) release();
    begun_bytes_ = 0;
  }

  // The next batch: for each part of the rows in order, that of every row.
  JAX_EP_FN const char* take() {
    ++taken_;
    return reader_.take();
  }
  // Whether nothing more comes before a release, or soon nothing does.
  JAX_EP_FN bool spent() const { return reader_.depth() < 4 || free_ + taken_ == reader_.depth(); }

  // All that was taken has been looked at.
  JAX_EP_FN void release() {
    reader_.release();
    free_ += taken_;
    taken_ = 0;
    ask();
  }

 private:
  // Of a job: its rows, of which this lane has one or none, that of number `place`, and the batch that is asked for
  // next.
  struct Asked {
    const char* mine = nullptr;
    int place = 0, rows = 0, row = 0, offset = 0;
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
      const int mine = now_.mine ? now_.place - now_.row : -1;
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
  Held<const Row> rows_;
  Places places_;
  int begun_bytes_ = 0;  // of a row of the job that was begun
};

}  // namespace jax_ep
