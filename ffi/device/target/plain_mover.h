// RowMover where rows go through registers: a store is ordered by the release of the flag that follows it.
#pragma once

#include "device/copy.h"

namespace jax_ep {

class RowMover {
 public:
  JAX_EP_FN explicit RowMover(const Team& team) : team_(team) {}

  template <class Source, class Sinks, class After>
  JAX_EP_FN void move(Stride places, int64_t bytes, Source source, Sinks sinks, After after) {
    for (int i = places.begin; i < places.end; i += places.step) {
      if (const char* from = source(i)) sinks(i, [&](char* to) { copy_row(team_, to, from, bytes); });
      team_.sync();
      after(i, *this);
    }
  }

  JAX_EP_FN void complete(int) { team_.sync(); }

 private:
  const Team& team_;
};

}  // namespace jax_ep
