// Moves rows through registers. The release of the flag that follows orders the stores.
#pragma once

#include "comm/copy.h"
#include "rows/terms.h"

namespace jax_ep {

// Rows one after another, each with all its sinks.
template <class Next, class Source, class Sink, class After>
JAX_EP_FN void copy_rows(const Coop& coop, Next next, int64_t bytes, int fanout, Source source, Sink sink,
                         After after) {
  for (int i = next(); i >= 0; i = next()) {
    const char* const from = source(i);
    for (int first = 0; from && first < fanout; first += Coop::lanes) {
      char* mine = sink(i, first + coop.lane);
      for (uint64_t left = coop.ballot(mine != nullptr); left; left &= left - 1)
        copy_row(coop, coop.from_lane(mine, lowest_bit(left)), from, bytes);
    }
    coop.sync();
    after(i);
  }
}

class PlainMover {
 public:
  JAX_EP_FN explicit PlainMover(const Coop& coop) : coop_(coop) {}

  template <class Next, class Source, class Sink, class After>
  JAX_EP_FN void move(Next next, int64_t bytes, int fanout, Source source, Sink sink, After after) {
    copy_rows(coop_, next, bytes, fanout, source, sink, [&](int item) { after(item, *this); });
  }

  JAX_EP_FN void acquire() const { coop_.sync(); }
  JAX_EP_FN int puts() const { return 0; }
  JAX_EP_FN void complete_to(int) { coop_.sync(); }

 private:
  const Coop& coop_;
};

// Brings nothing ahead, as rows are read where they lie.
class PlainReader {
 public:
  JAX_EP_FN PlainReader(const Coop&, int, bool, int) {}
  JAX_EP_FN int depth() const { return 0; }
  JAX_EP_FN bool in_bulk() const { return false; }
  JAX_EP_FN void acquire() {}
  JAX_EP_FN void ask(int, int, const char*, int) {}
  JAX_EP_FN const char* take() { return nullptr; }
  JAX_EP_FN void release() {}
};

class PlainWriter {
 public:
  JAX_EP_FN PlainWriter(const Coop& coop, int, bool, int = 0) : coop_(coop) {}

  template <class Sinks, class Fill>
  JAX_EP_FN void put(const Sinks& sinks, int64_t offset, int, Fill fill) {
    for_each_term(sinks, [&](const WeightedRow<char>& sink) { fill(sink.row + offset); });
  }
  template <class Sinks, class Fill>
  JAX_EP_FN void put_directly(const Sinks& sinks, int64_t offset, int bytes, Fill fill) {
    put(sinks, offset, bytes, fill);
  }
  JAX_EP_FN char* stage(bool) const { return nullptr; }
  JAX_EP_FN void seal() const {}
  template <class Sinks>
  JAX_EP_FN void send(const Sinks&, int64_t, int, const char*) const {}
  JAX_EP_FN void commit() const {}
  JAX_EP_FN int puts() const { return 0; }
  JAX_EP_FN void complete_to(int) { coop_.sync(); }

 private:
  const Coop& coop_;
};

}  // namespace jax_ep
