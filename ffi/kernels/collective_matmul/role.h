// The roles of warps in a kernel of a product and its collective.
#pragma once

#include "comm/platform.h"
#include "gemm/layout.h"
#include "gemm/ptx/warps.h"

namespace jax_ep {

constexpr int kWarpsPerCta = gemm::kThreads / Coop::lanes;

JAX_EP_FN int this_warp() { return gemm::uniform(threadIdx.x / Coop::lanes); }  // all lanes call

// The named barriers of roles. The multiplying warps use 1 and 2. Roles of one warp per CTA share barrier 3, because
// such a warp waits for no other.
enum Barrier { kLoneWarps = 3, kCommunicators = 4, kWholeCtas = 5 };

// A role: `warps` warps from `first_warp` on, in each of `ctas` CTAs from `first_cta` on. An op has the coops of all
// its roles (Op::finish). Coop::cta_sync of a role uses its named barrier, never barrier 0, which is for all threads.
struct Role {
  int first_warp, warps, first_cta, ctas;
  int barrier;

  JAX_EP_FN int coops() const { return warps * ctas; }
  JAX_EP_FN bool is_mine() const {
    const int warp = this_warp() - first_warp, cta = static_cast<int>(blockIdx.x) - first_cta;
    return 0 <= warp && warp < warps && 0 <= cta && cta < ctas;
  }

  // This warp as one of the coops of its role. `memory`: `bytes` for each warp of the CTA.
  JAX_EP_FN Coop coop(bool is_tracked = false, char* memory = nullptr, int bytes = 0) const {
    const int warp = this_warp() - first_warp, cta = static_cast<int>(blockIdx.x) - first_cta;
    const Part all{warp * ctas + cta, coops()};
    // At most one warp of a CTA writes the timeline.
    const TrackRole track = is_tracked && warp == 0 ? TrackRole::sender : TrackRole::none;
    const int lane = threadIdx.x % Coop::lanes;
    return {all.index, all.count, all,    all, {cta, ctas}, {warp, warps}, lane, memory + warp * bytes,
            bytes,     track,     barrier};
  }
};

// The roles of a kernel, by number. A warp has at most one of them at a time.
template <int kCount>
struct Roles {
  struct Mine {
    int number;  // -1: none
    Role role;
  };
  Role all[kCount];

  JAX_EP_FN int coops() const {
    int coops = 0;
#pragma unroll
    for (const Role& role : all) coops += role.coops();
    return coops;
  }
  JAX_EP_FN Mine mine() const {
    Mine found{-1, {}};
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      if (all[i].is_mine()) found = {i, all[i]};
    return found;
  }
};

JAX_EP_FN Role one_warp_a_cta(int warp) { return {warp, 1, 0, static_cast<int>(gridDim.x), kLoneWarps}; }

// All warps of some CTAs, which poison results.
JAX_EP_FN Role whole_ctas(int first_cta, int ctas) { return {0, kWarpsPerCta, first_cta, ctas, kWholeCtas}; }

}  // namespace jax_ep
