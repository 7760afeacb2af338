// Programmatic dependent launch: a kernel that is launched so may begin while the one before it on the stream runs.
// Elsewhere than on Hopper kernels are launched one behind the other, and these do nothing.
#pragma once

#include "comm/platform.h"

namespace jax_ep::ptx {

// From here on the kernel behind may begin, as soon as all CTAs have called it or have ended. One thread of a CTA
// calls.
JAX_EP_FN void let_next_kernel_begin() {
  if constexpr (kHopper) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Waits until the kernel before has ended, and all that it wrote is visible. Some thread of every kernel that may begin
// early calls it before the kernel ends: else the kernel behind could begin while the one before still runs.
JAX_EP_FN void wait_for_kernel_before() {
  if constexpr (kHopper) asm volatile("griddepcontrol.wait;" ::: "memory");
}

}  // namespace jax_ep::ptx
