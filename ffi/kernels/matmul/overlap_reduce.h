// One kernel for a product and its reduction. All CTAs multiply; a warp of each announces what its CTA has written, and
// in the last CTAs two more reduce what is ready. So the product keeps all SMs, and those of the other CTAs are free
// for other kernels as soon as it is done, whatever peers do.
//
// Reducers wait for peers, and keep the SMs of their CTAs meanwhile. They are in the last CTAs, which a GPU starts when
// all others have their SMs. A reducer that does not see all reducers begin within 20 us leaves; the last to begin
// never does, and with those that stay sums all. So a kernel that keeps some CTAs from starting costs the sums their
// warps, but does not lock them up.
#pragma once

#include "comm/target/ptx/bulk.h"
#include "kernels/matmul/overlap.h"
#include "kernels/matmul/reduce.h"

namespace jax_ep {

constexpr int kReducersPerCta = gemm::kAuxWarps - 1;
constexpr int kReducerBytes = 128 + 8 * 2048;  // two batches to write, six to read

// What the aux warps of a CTA share, in its shared memory.
struct Reducers {
  alignas(128) char memory[kReducersPerCta][kReducerBytes];
  uint32_t written[gemm::kConsumerWarps];  // parts of tiles, by multiplying warp: one may be ahead of another
};

template <>
struct AuxOf<MatmulReduceArgs> {
  using Type = Reducers;
};

template <class T>
struct ReduceHooks {
  static constexpr bool kStores = false, kAwaitStores = true;
  using Aux = typename AuxOf<MatmulReduceArgs>::Type;
  const Work<MatmulReduceArgs>& work;
  const gemm::Problem& problem;
  Reducers& aux;

  JAX_EP_FN gemm::Rows before_tile(const gemm::Tile& tile, const CUtensorMap& a) const { return {a, tile.row}; }
  JAX_EP_FN void after_tile(const gemm::Tile&, int warp) const {
    if (threadIdx.x % Coop::lanes != 0) return;
    ptx::proxy_fence();
    ptx::count_one(&aux.written[warp]);
  }
  JAX_EP_FN void after_last(const gemm::Tile&, int, int) const {}
  JAX_EP_FN void run_aux(int warp, gemm::Share share) const {
    if (warp == 0)
      announce(share);
    else if (communicators(work).has(share.cta))
      reduce(warp - 1);
  }

 private:
  JAX_EP_FN void finish(Op& op) const {
    const Role announcers = one_warp_a_cta(), reducers = communicators(work);
    op.finish(results_of(work.comm, work.args), announcers.coops() + reducers.coops());
  }

  // A row block is announced when all of its tiles are written.
  JAX_EP_FN void announce(gemm::Share share) const {
    const MatmulReduceArgs& args = work.args;
    const Coop coop = one_warp_a_cta().coop(0);
    Op op(work.comm, coop, kind_of(args));
    const RowBlocks row_blocks(args.m);
    gemm::Schedule schedule(problem, work.block_n, share);
    int tiles_seen = 0;
    for (gemm::Tile tile; schedule.next(&tile); ++tiles_seen) {
      wait_written(aux.written, work.block_n, tiles_seen);
      if (tile.row >= args.m || tile.col >= args.n) continue;
      const Range rows = row_blocks.chunk(row_blocks.chunk_of(tile.row));
      const int tiles = ceil_div(rows.end - rows.begin, gemm::kBlockM) * ceil_div(args.n, work.block_n) *
                        (problem.split_k ? gemm::kCluster : 1);
      op.deliver(row_blocks.chunk_of(tile.row), 1, tiles);
    }
    finish(op);
  }

  JAX_EP_FN void reduce(int warp) const {
    const Coop coop = communicators(work).coop(warp, /*track=*/warp == 0 ? 0 : -1, aux.memory[warp], kReducerBytes);
    Op op(work.comm, coop, kind_of(work.args));
    op.post(posted(work.args, work.comm.size));
    if (all_begin(coop, &op.heap->members, coop.count)) {
      op.wait_posted();
      MatmulReduce<T> sums(op, work.args);
      sums.reduce();
      conclude_reduction<T>(op, work.args);
      sums.wait_concluded();
    } else {
      conclude_reduction<T>(op, work.args);
    }
    finish(op);
  }
};

template <class In, class Out, int kBlockN, bool kMnB>
JAX_EP_FN void run_overlapped(char* memory, const Operands& operands, const Work<MatmulReduceArgs>& work) {
  using Hooks = ReduceHooks<typename RowOf<Out>::Type>;
  poison_results(work);
  Reducers& aux = reinterpret_cast<gemm::Shared<kBlockN, Reducers>*>(memory)->aux;
  if (threadIdx.x < gemm::kConsumerWarps) aux.written[threadIdx.x] = 0;  // before all warps meet
  const Hooks hooks{work, operands.problem, aux};
  gemm::multiply_tiles<In, Out, kBlockN, false, kMnB>(memory, operands.a, operands.b, operands.out_map, operands.out,
                                                      operands.problem, hooks, gemm::this_share());
}

}  // namespace jax_ep
