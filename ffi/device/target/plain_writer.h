// RowWriter where rows go straight from registers to memory.
#pragma once

#include "device/platform.h"

namespace jax_ep {

class PlainWriter {
 public:
  JAX_EP_FN explicit PlainWriter(const Team& team) : team_(team) {}

  // Writes a team's pieces from value `first` of a row of `hidden` values on.
  template <class Pieces, class T, int kPieces>
  JAX_EP_FN void put(const Pieces (&pieces)[kPieces], T* row, int first, int hidden, bool words) {
    for (int i = 0; i < kPieces; ++i) {
      const int at = first + (i * Team::lanes + team_.lane) * Pieces::kCount, left = hidden - at;
      pieces[i].store(row + at, left < Pieces::kCount ? left : Pieces::kCount, words);
    }
  }

  // A name for all that was put so far; complete_to returns when that is written.
  JAX_EP_FN int mark() const { return 0; }
  JAX_EP_FN void complete_to(int) { team_.sync(); }

 private:
  const Team& team_;
};

#ifndef JAX_EP_OWN_MOVER
using RowWriter = PlainWriter;
#endif

}  // namespace jax_ep
