// A lane's pack of a row: neighbouring values, 16 bytes in registers on a GPU.
#pragma once

#include "comm/copy.h"
#include "comm/integers.h"
#include "rows/numeric.h"

namespace jax_ep {

// As many values as a lane moves at once: one word on a GPU, enough for the vectoriser on the CPU.
template <class T>
constexpr int kPackValues = Coop::lanes == 1 ? 128 : 16 / sizeof(T);

// A coop of many lanes moves whole packs. A coop of one lane moves as many values as there are.
template <class T, int kValues = kPackValues<T>>
struct Pack {
  using Word = std::conditional_t<kValues * sizeof(T) % 16 == 0, Word16, uint64_t>;
  static constexpr int kWords = kValues * sizeof(T) / sizeof(Word);

  union {
    T values[kValues];
    Word words[kWords];
  };

  JAX_EP_FN void load(const T* from, int count = kValues) {
    if constexpr (Coop::lanes == 1)
      memcpy(values, from, smaller(count, kValues) * sizeof(T));
    else if (count > 0)
      for (int i = 0; i < kWords; ++i) words[i] = reinterpret_cast<const Word*>(from)[i];
  }
  JAX_EP_FN void store(T* to, int count = kValues) const {
    if constexpr (Coop::lanes == 1)
      memcpy(to, values, smaller(count, kValues) * sizeof(T));
    else if (count > 0)
      for (int i = 0; i < kWords; ++i) reinterpret_cast<Word*>(to)[i] = words[i];
  }
};

}  // namespace jax_ep
