// The limit on the parameters of a launch, besides tensor maps. A launch copies its parameters, and all coops read them
// from cold memory.
#pragma once

#include <cstddef>

namespace jax_ep {

constexpr std::size_t kMaxParameterBytes = 1024;

// The bytes of a kernel's parameters, with their alignment.
template <class... Parameters>
constexpr std::size_t parameter_bytes() {
  std::size_t end = 0;
  ((end = (end + alignof(Parameters) - 1) / alignof(Parameters) * alignof(Parameters) + sizeof(Parameters)), ...);
  return end;
}

}  // namespace jax_ep
