// One kernel on Hopper for a dispatch and the product of its rows. The first CTAs dispatch, with the warps that
// multiply afterwards; the others multiply at once. In every CTA an aux warp looks out for the rows of its tiles, so no
// warp that loads or multiplies waits for memory.
#pragma once

#include "comm/target/ptx/bulk.h"
#include "comm/target/ptx/cta.h"
#include "gemm/kernel.h"
#include "kernels/moe/dispatch_dot.h"
#include "kernels/role.h"

namespace jax_ep {

// What the kernel is told of its op.
struct DotWork {
  Comm comm;
  DispatchDotArgs args;
  int dispatching, senders_per_cta, head;  // as in DotConfig

  JAX_EP_FN gemm::Share share() const {
    return {static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x), dispatching, head};
  }
};

// What the warps of a CTA share, in its shared memory.
struct DotLookout {
  uint32_t here;                  // tiles of which the rows are here
  uint32_t rows[gemm::kCluster];  // by CTA of the cluster: whether it knows that rows will come
};

// The warps that dispatch: as many of a CTA as a dispatch alone has, which meet at a barrier of their own.
constexpr int kDispatchers = gemm::kConsumerWarps;
static_assert(kDispatchers <= kMaxCtaCoops, "the scratch of routing has room for no more");
JAX_EP_FN Role dispatchers(const DotWork& work) { return {0, kDispatchers, 0, work.dispatching, kCommunicators}; }
JAX_EP_FN Role finishers() { return one_warp_a_cta(0); }
JAX_EP_FN Role lookouts() { return one_warp_a_cta(gemm::kFirstAuxWarp); }
JAX_EP_FN Role tellers() { return one_warp_a_cta(gemm::kConsumerWarps); }

JAX_EP_FN Coop dispatching_coop(const DotWork& work, char* memory, int bytes) {
  const int cta = blockIdx.x, ctas = work.dispatching, warp = this_warp();
  return {cta * kDispatchers + warp,
          ctas * kDispatchers,
          sender_part(cta, ctas, warp, work.senders_per_cta),
          receiver_part(cta, ctas, warp, kDispatchers, work.senders_per_cta),
          {cta, ctas},
          {warp, kDispatchers},
          static_cast<int>(threadIdx.x) % Coop::lanes,
          memory + warp * bytes,
          bytes,
          track_of(warp, work.senders_per_cta),
          kCommunicators};
}

// Called by the dispatchers, and by the finisher of every CTA when its tiles are stored: then nobody in the CTA waits
// for rows.
JAX_EP_FN void finish(Op& op, const DotWork& work) {
  const Roles<2> roles{dispatchers(work), finishers()};
  op.finish(Results<DispatchDotArgs>(work.args, work.comm.size), roles.coops());
}

struct DotHooks {
  static constexpr bool kStores = false, kAwaitStores = false;
  using Aux = DotLookout;
  const DotWork& work;
  const gemm::Problem& problem;
  const int block_n;
  DotLookout& aux;
  mutable uint32_t awaited = 0;  // of the producer

  JAX_EP_FN gemm::Rows before_tile(const gemm::Tile& tile, const CUtensorMap& received) const {
    if (must_wait(tile)) ptx::wait_count(&aux.here, ++awaited);
    return {received, tile.row};
  }
  JAX_EP_FN void after_tile(const gemm::Tile&, int) const {}
  JAX_EP_FN void after_last(const gemm::Tile&, int, int) const {}
  JAX_EP_FN void run_aux(gemm::Share share) const {
    if (!lookouts().is_mine()) return;
    const Coop coop = lookouts().coop();
    Op op(work.comm, coop, kind_of(work.args));
    const ReadyRows ready(op, work.args.ready, work.args.capacity);
    gemm::Schedule schedule(problem, block_n, share);
    for (gemm::Tile tile; schedule.next(&tile);) {
      if (!must_wait(tile)) continue;
      ready.await(multiplied_rows(tile));
      ptx::proxy_fence();
      if (coop.lane == 0) ptx::count_one(&aux.here);
    }
  }

 private:
  JAX_EP_FN bool must_wait(const gemm::Tile& tile) const {
    return multiplied_rows(tile).begin < multiplied_rows(tile).end;
  }
};

// The part of a CTA that dispatches, by its first kDispatchers warps, in the first `bytes` of its shared memory.
JAX_EP_FN void dispatch_here(const DotWork& work, char* memory, int bytes) {
  const Coop coop = dispatching_coop(work, memory, bytes / kDispatchers / 128 * 128);
  Op op(work.comm, coop, kind_of(work.args));
  op.poison(Results<DispatchDotArgs>(work.args, work.comm.size));
  dispatch_rows(op, work.args);
  finish(op, work);
  RowMover::close(coop);
  ptx::proxy_fence();  // before the product's loads overwrite what was left there
}

// By the tellers. Both CTAs of a cluster multiply or none does, so both are told what each has found.
JAX_EP_FN void tell_whether_rows_come(const DotWork& work, DotLookout& aux) {
  const Coop coop = tellers().coop();
  Op op(work.comm, coop, kind_of(work.args));
  const bool rows = await_sizes(op, work.args);
  if (coop.lane < gemm::kCluster) gemm::store_at_peer(&aux.rows[blockIdx.x % gemm::kCluster], coop.lane, rows);
}

template <class In, int kBlockN>
__global__ void __cluster_dims__(gemm::kCluster, 1, 1) __launch_bounds__(gemm::kThreads, 1)
    dispatch_dot_kernel(const __grid_constant__ CUtensorMap received, const __grid_constant__ CUtensorMap rhs,
                        const __grid_constant__ CUtensorMap product, const __grid_constant__ gemm::Problem problem,
                        const __grid_constant__ DotWork work) {
  extern __shared__ __align__(1024) char memory[];
  DotLookout& aux = reinterpret_cast<gemm::Shared<kBlockN, DotLookout>*>(memory)->aux;
  if (threadIdx.x == 0) aux.here = 0;
  gemm::sync_cluster();  // both CTAs run, so each may write to the other
  if (dispatchers(work).is_mine())
    dispatch_here(work, memory, static_cast<int>(reinterpret_cast<char*>(&aux) - memory));
  else if (tellers().is_mine())
    tell_whether_rows_come(work, aux);
  gemm::sync_cluster();
  if (aux.rows[0] && aux.rows[1]) {
    const DotHooks hooks{work, problem, kBlockN, aux};
    gemm::multiply_tiles<In, In, kBlockN, false, true>(memory, received, rhs, product, work.args.product, problem,
                                                       hooks, work.share());
    if (threadIdx.x >= gemm::kConsumers) return;
    ptx::sync_some(1, gemm::kConsumers);  // all that multiply have written their tiles
  }
  if (!finishers().is_mine()) return;
  const Coop coop = finishers().coop();
  Op op(work.comm, coop, kind_of(work.args));
  finish(op, work);
}

}  // namespace jax_ep
