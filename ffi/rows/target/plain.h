// Rows that go through registers: a store is ordered by the release of the flag that follows it.
#pragma once

#include "comm/copy.h"
#include "rows/lineup.h"

namespace jax_ep {

// One row to all its places.
template <class Sink>
JAX_EP_FN void copy_to_all(const Team& team, const char* from, int64_t bytes, int fanout, int place, Sink sink) {
  for (int first = 0; first < fanout; first += Team::lanes) {
    char* mine = sink(place, first + team.lane);
    for (uint64_t left = team.ballot(mine != nullptr); left; left &= left - 1)
      copy_row(team, team.from_lane(mine, lowest_bit(left)), from, bytes);
  }
}

// Rows one after another, each with all its places.
template <class Next, class Source, class Sink, class After>
JAX_EP_FN void copy_rows(const Team& team, Next next, int64_t bytes, int fanout, Source source, Sink sink,
                         After after) {
  for (int i = next(); i >= 0; i = next()) {
    if (const char* from = source(i)) copy_to_all(team, from, bytes, fanout, i, sink);
    team.sync();
    after(i);
  }
}

class PlainMover {
 public:
  JAX_EP_FN explicit PlainMover(const Team& team) : team_(team) {}

  template <class Next, class Source, class Sink, class After>
  JAX_EP_FN void move(Next next, int64_t bytes, int fanout, Source source, Sink sink, After after) {
    copy_rows(team_, next, bytes, fanout, source, sink, [&](int place) { after(place, *this); });
  }

  JAX_EP_FN int mark() const { return 0; }
  JAX_EP_FN void complete_to(int) { team_.sync(); }

 private:
  const Team& team_;
};

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

}  // namespace jax_ep
