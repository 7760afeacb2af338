// RowReader and RowWriter where lanes access memory themselves.
#pragma once

#include "rows/lineup.h"

namespace jax_ep {

// Brings nothing ahead: rows are read where they are.
class PlainReader {
 public:
  JAX_EP_FN PlainReader(const Team&, int, bool, int) {}
  JAX_EP_FN int depth() const { return 0; }
  JAX_EP_FN bool in_bulk() const { return false; }
  JAX_EP_FN void acquire() {}
  JAX_EP_FN void ask(int, int, const char*, int) {}
  JAX_EP_FN const char* take() { return nullptr; }
  JAX_EP_FN void release() {}
};

class PlainWriter {
 public:
  JAX_EP_FN PlainWriter(const Team& team, int, bool, int = 0) : team_(team) {}

  template <class Places, class Fill>
  JAX_EP_FN void put(const Places& places, int64_t offset, int, Fill fill) {
    auto walk = places.walk();
    for (char* place = walk.next().row; place; place = walk.next().row) fill(place + offset);
  }
  template <class Places, class Fill>
  JAX_EP_FN void put_directly(const Places& places, int64_t offset, int bytes, Fill fill) {
    put(places, offset, bytes, fill);
  }
  JAX_EP_FN char* stage(bool) const { return nullptr; }
  JAX_EP_FN void seal() const {}
  template <class Places>
  JAX_EP_FN void send(const Places&, int64_t, int, const char*) const {}
  JAX_EP_FN void commit() const {}
  JAX_EP_FN int mark() const { return 0; }
  JAX_EP_FN void complete_to(int) { team_.sync(); }

 private:
  const Team& team_;
};

#ifndef JAX_EP_OWN_STREAMS
using RowReader = PlainReader;
using RowWriter = PlainWriter;
#endif

}  // namespace jax_ep
