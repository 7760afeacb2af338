// One kernel for a gather and its product. All CTAs multiply; a warp of each looks out for the rows of its tiles, and
// two more spread this rank's rows. They take them in turns, so peers get all rows however few of the CTAs run.
#pragma once

#include "comm/target/ptx/bulk.h"
#include "kernels/matmul/gather.h"
#include "kernels/matmul/overlap.h"

namespace jax_ep {

static_assert(kBlockRows == gemm::kBlockM, "a flag stands for whole tiles");

// What the aux warps of a CTA share, in its shared memory.
struct Lookout {
  uint32_t here;  // tiles that had to wait for their rows, and need not any more
};

template <>
struct AuxOf<GatherMatmulArgs> {
  using Type = Lookout;
};

// A tile's rows are read from where they are: this rank's own from its operand, the others from what is gathered.
struct GatherHooks {
  static constexpr bool kStores = false, kAwaitStores = false;
  using Aux = typename AuxOf<GatherMatmulArgs>::Type;
  const Work<GatherMatmulArgs>& work;
  const gemm::Problem& problem;
  Lookout& aux;
  mutable uint32_t awaited = 0;  // of the producer

  JAX_EP_FN gemm::Rows before_tile(const gemm::Tile& tile, const CUtensorMap& gathered) const {
    if (must_wait(tile)) ptx::wait_count(&aux.here, ++awaited);
    if (is_own(tile)) return {work.own, tile.row - work.comm.rank * work.args.m};
    return {gathered, tile.row};
  }
  JAX_EP_FN void after_tile(const gemm::Tile&, int) const {}
  JAX_EP_FN void after_last(const gemm::Tile&, int, int) const {}
  JAX_EP_FN void run_aux(int warp, gemm::Share share) const {
    if (warp == 0)
      look_out(share);
    else if (communicators(work).has(share.cta))
      spread(warp - 1);
  }
  // Called by the lookouts, by a warp for all of its CTA that multiply, and by the spreaders.
  JAX_EP_FN void finish(Op& op) const {
    const Role lookouts = one_warp_a_cta(), multipliers = one_warp_a_cta(), spreaders = communicators(work);
    op.finish(results_of(work.comm, work.args), lookouts.coops() + multipliers.coops() + spreaders.coops());
  }

 private:
  JAX_EP_FN Range rows_of(const gemm::Tile& tile) const {
    return {tile.row, smaller(tile.row + gemm::kBlockM, work.args.m * work.comm.size)};
  }
  JAX_EP_FN bool is_own(const gemm::Tile& tile) const {
    const int first = work.comm.rank * work.args.m;
    return first <= rows_of(tile).begin && rows_of(tile).end <= first + work.args.m;
  }
  // Debug: nothing may be written before the result is poisoned, which every flag stands for.
  JAX_EP_FN bool must_wait(const gemm::Tile& tile) const { return !is_own(tile) || work.comm.poison; }

  JAX_EP_FN void look_out(gemm::Share share) const {
    const Coop coop = one_warp_a_cta().coop(0);
    Op op(work.comm, coop, kind_of(work.args));
    gemm::Schedule schedule(problem, work.block_n, share);
    for (gemm::Tile tile; schedule.next(&tile);) {
      if (!must_wait(tile)) continue;
      wait_rows(op, work.args, rows_of(tile));
      ptx::proxy_fence();
      if (coop.lane == 0) ptx::count_one(&aux.here);
    }
    finish(op);
  }

  JAX_EP_FN void spread(int warp) const {
    const Coop coop = communicators(work).coop(warp, /*track=*/warp == 0 ? 0 : -1);
    Op op(work.comm, coop, kind_of(work.args));
    op.post(posted(work.args, work.comm.size));
    spread_rows(op, work.args);
    finish(op);
  }
};

template <class In, class Out, int kBlockN, bool kMnB>
JAX_EP_FN void run_overlapped(char* memory, const Operands& operands, const Work<GatherMatmulArgs>& work) {
  poison_results(work);
  Lookout& aux = reinterpret_cast<gemm::Shared<kBlockN, Lookout>*>(memory)->aux;
  if (threadIdx.x == 0) aux.here = 0;  // before all warps meet
  const GatherHooks hooks{work, operands.problem, aux};
  gemm::multiply_tiles<In, Out, kBlockN, false, kMnB>(memory, operands.a, operands.b, operands.out_map, operands.out,
                                                      operands.problem, hooks, gemm::this_share());
  if (threadIdx.x >= gemm::kConsumers) return;
  ptx::sync_some(1, gemm::kConsumers);  // all that multiply have written their tiles
  if (threadIdx.x >= Coop::lanes) return;
  const Coop coop = one_warp_a_cta().coop(0);
  Op op(work.comm, coop, kind_of(work.args));
  hooks.finish(op);
}

}  // namespace jax_ep
