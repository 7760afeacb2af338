// Who does what in a kernel of a product and its collective.
#pragma once

#include "comm/platform.h"
#include "gemm/layout.h"

namespace jax_ep {

constexpr int kWarpsPerCta = gemm::kThreads / 32;

// A role of a kernel's warps: so many in each of some CTAs share its work. How many coops take part in an op follows
// from its roles: see Op::finish. Where the warps of a role in a CTA meet (Coop::cta_sync), they do so at its named
// barrier; 0 is that of all warps.
struct Role {
  int warps, first_cta, ctas;
  int barrier;

  JAX_EP_FN int coops() const { return warps * ctas; }
  JAX_EP_FN bool has(int cta) const { return first_cta <= cta && cta < first_cta + ctas; }

  // One of its warps in this CTA, which has the role. `memory` is the warp's own. At most one warp of a CTA may be
  // given a `track` of the timeline.
  JAX_EP_FN Coop coop(int warp, int track = -1, char* memory = nullptr, int bytes = 0) const {
    const int cta = static_cast<int>(blockIdx.x) - first_cta, lane = threadIdx.x % Coop::lanes;
    const Part all{warp * ctas + cta, coops()};
    return {all.index, all.count, all, all, {cta, ctas}, {warp, warps}, lane, memory, bytes, track, barrier};
  }
};

// One warp of every CTA. Those that multiply meet at barriers 1 and 2.
JAX_EP_FN Role one_warp_a_cta() { return {1, 0, static_cast<int>(gridDim.x), /*barrier=*/3}; }

}  // namespace jax_ep
