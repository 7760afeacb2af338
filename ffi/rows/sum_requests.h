// The order in which a RowStream reads the rows of several sums: sum by sum, each in neighbouring lanes.
#pragma once

#include "comm/integers.h"
#include "rows/row_stream.h"

namespace jax_ep {

class SumRequests {
 public:
  SumRequests() = default;
  template <class Row>
  JAX_EP_FN SumRequests(const LaneTerms<const Row>& rows, Cut cut)
      : mine_(reinterpret_cast<const char*>(rows.mine())),
        left_(rows.holders()),
        before_(rows.lanes_before()),
        stride_(rows.stride()),
        cut_(cut) {}

  JAX_EP_FN bool done() const { return !left_; }
  JAX_EP_FN Batches next(int most) {
    // Rows of a single part are read in the order of lanes, whatever sums they belong to.
    const bool in_order = cut_.row_bytes <= cut_.batch_bytes;
    const Lanes lanes = in_order ? left_ : left_ & lanes_of_first_sum(left_, stride_);
    const int rows = count_bits(lanes), count = smaller(most, rows - row_);
    const int bytes = smaller(cut_.batch_bytes, cut_.row_bytes - offset_);
    const int mine = lanes & (before_ + 1) ? count_bits(lanes & before_) - row_ : -1;
    const Batches batches{mine, count, mine_ + offset_, bytes};
    row_ += count;
    if (row_ < rows) return batches;
    row_ = 0;
    offset_ += cut_.batch_bytes;
    if (offset_ < cut_.row_bytes) return batches;
    offset_ = 0;
    left_ &= ~lanes;
    return batches;
  }

 private:
  const char* mine_ = nullptr;
  Lanes left_ = 0, before_ = 0;  // the lanes whose rows are not read to their end; those before this lane
  int stride_ = Coop::lanes, row_ = 0, offset_ = 0;
  Cut cut_{0, 0};
};

}  // namespace jax_ep
