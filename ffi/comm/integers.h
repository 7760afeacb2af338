// Integer arithmetic, for kernels and for plans on the host.
#pragma once

#include <cstdint>

#include "comm/platform.h"

namespace jax_ep {

JAX_EP_FN int smaller(int a, int b) { return a < b ? a : b; }
JAX_EP_FN int larger(int a, int b) { return a > b ? a : b; }

// For numbers that are not negative.
JAX_EP_CONSTANT_FN int ceil_div(int a, int b) { return (a + b - 1) / b; }
JAX_EP_CONSTANT_FN int align_up(int a, int alignment) { return (a + alignment - 1) / alignment * alignment; }

// Divides by a number known only at run time, with one multiplication. Exact for every dividend below 2^32.
class Divider {
 public:
  JAX_EP_FN explicit Divider(int divisor) : divisor_(divisor), magic_(divisor > 1 ? ~uint64_t{0} / divisor + 1 : 0) {}
  JAX_EP_FN int quotient(int n) const {
    if (divisor_ <= 1) return n;
    return static_cast<int>((static_cast<unsigned __int128>(magic_) * static_cast<uint32_t>(n)) >> 64);
  }

 private:
  int divisor_;
  uint64_t magic_;
};

}  // namespace jax_ep
