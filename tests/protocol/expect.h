// How a check fails: at once, whatever other threads and processes do.
#pragma once

#include <cstdio>
#include <cstdlib>

namespace jax_ep {

inline void expect(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "FAILED: %s\n", what);
  std::_Exit(1);
}

}  // namespace jax_ep
