// RowStream for jobs of several sums, each with its rows and sinks in neighbouring lanes. A class of its own, because
// with one class for both nvcc 13.0 spills twice as many registers in sparse_reduce.
#pragma once

#include "comm/integers.h"
#include "rows/row_stream.h"

namespace jax_ep {

template <class Row, class Sinks>
class SumsStream {
 public:
  // All functions as in RowStream.
  JAX_EP_FN SumsStream(const Coop& coop, int stage_bytes, bool bulk, int writer_bytes)
      : lanes_before_(first_lanes(coop.lane)), reader_(coop, stage_bytes, bulk, writer_bytes), free_(reader_.depth()) {}

  JAX_EP_FN bool in_bulk() const { return reader_.in_bulk(); }
  JAX_EP_FN void acquire() { reader_.acquire(); }

  JAX_EP_FN void ask_for(const LaneTerms<const Row>& rows, Cut cut) {
    then_ = {reinterpret_cast<const char*>(rows.mine()), rows.holders(), rows.stride(), 0, 0, cut};
    ask();
  }
  JAX_EP_FN void begin(const LaneTerms<const Row>& rows, const Sinks& sinks, Cut cut) {
    rows_ = rows;
    sinks_ = sinks;
    begun_bytes_ = cut.row_bytes;
  }

  template <class Work>
  JAX_EP_FN void finish(Work work) {
    if (begun_bytes_) work(rows_, sinks_, begun_bytes_);
    begun_bytes_ = 0;
  }

  JAX_EP_FN void drop() {
    now_ = then_ = {};
    while (free_ + taken_ < reader_.depth()) take();
    if (begun_bytes_) release();
    begun_bytes_ = 0;
  }

  // The next batch. The order is, sum by sum: the first part of every row, the second part of every row, and so on.
  JAX_EP_FN const char* take() {
    ++taken_;
    return reader_.take();
  }
  // Whether a release is due: because no batch is left to take, or there are too few stages to put it off.
  JAX_EP_FN bool spent() const { return reader_.depth() < 4 || free_ + taken_ == reader_.depth(); }

  // How many batches are to be released.
  JAX_EP_FN int taken() const { return taken_; }

  JAX_EP_FN void release() {
    reader_.release();
    free_ += taken_;
    taken_ = 0;
    ask();
  }

 private:
  // The requests of a job. `left`: the lanes whose rows are not read to their end. `row` and `offset` say which batch
  // comes next.
  struct Asked {
    const char* mine = nullptr;
    Lanes left = 0;
    int stride = Coop::lanes, row = 0, offset = 0;
    Cut cut{0, 0};
  };

  JAX_EP_FN void ask() {
    for (;;) {
      if (!now_.left) {
        now_ = then_;
        then_ = {};
      }
      if (free_ == 0 || !now_.left) return;
      // Rows of a single part are read in the order of lanes, whatever sums they belong to.
      const bool in_order = now_.cut.row_bytes <= now_.cut.batch_bytes;
      const Lanes lanes = in_order ? now_.left : now_.left & lanes_of_first_sum(now_.left, now_.stride);
      const int rows = count_bits(lanes), count = smaller(free_, rows - now_.row);
      const int bytes = smaller(now_.cut.batch_bytes, now_.cut.row_bytes - now_.offset);
      const int mine = lanes & (lanes_before_ + 1) ? count_bits(lanes & lanes_before_) - now_.row : -1;
      reader_.ask(mine, count, now_.mine + now_.offset, bytes);
      free_ -= count;
      now_.row += count;
      if (now_.row < rows) continue;
      now_.row = 0;
      now_.offset += now_.cut.batch_bytes;
      if (now_.offset < now_.cut.row_bytes) continue;
      now_.offset = 0;
      now_.left &= ~lanes;
    }
  }

  const Lanes lanes_before_;  // this one
  RowReader reader_;
  int free_, taken_ = 0;
  Asked now_, then_;
  LaneTerms<const Row> rows_;
  Sinks sinks_;
  int begun_bytes_ = 0;  // of a row of the job that was begun
};

}  // namespace jax_ep
