#pragma once

namespace jax_ep::ptx {

inline void proxy_fence() {}

}  // namespace jax_ep::ptx
