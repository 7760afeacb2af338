// One kernel for a product and its collective. All CTAs multiply. The three aux warps of the producer's warpgroup,
// which the product does not need, communicate. This file has their roles in a gather and in a reduction.
// overlap_exchange.h has the exchange of two ranks.
#pragma once

#include "comm/op.h"
#include "comm/platform.h"
#include "comm/platform/ptx/bulk.h"
#include "comm/platform/ptx/cta.h"
#include "gemm/mainloops.h"
#include "kernels/collective_matmul/all_gather.h"
#include "kernels/collective_matmul/args.h"
#include "kernels/collective_matmul/reduce.h"
#include "kernels/collective_matmul/role.h"

namespace jax_ep {

// The format in rows/ of a type of gemm/.
float row_format(float);
BFloat16 row_format(__nv_bfloat16);
Float16 row_format(__half);
template <class T>
using RowOf = decltype(row_format(T{}));

template <class Args>
struct OverlapWork {
  Comm comm;
  Args args;
  int communicating;        // CTAs
  int first_communicating;  // the first of them
  int block_n;              // columns of a tile
};

// This rank's rows in its operand. Only a gather has this.
template <class Args>
using OwnMap = std::conditional_t<std::is_same_v<Args, AllGatherMatmulArgs>, CUtensorMap, gemm::Nothing>;

// Roles of all these kernels: one aux warp of every CTA, and the other two aux warps of CTAs that communicate.
JAX_EP_FN Role first_aux_warps() { return one_warp_a_cta(gemm::kFirstAuxWarp); }
constexpr int kOtherAuxWarps = gemm::kAuxWarps - 1;
JAX_EP_FN Role other_aux_warps(int first_cta, int ctas) {
  return {gemm::kFirstAuxWarp + 1, kOtherAuxWarps, first_cta, ctas, kCommunicators};
}

template <class Args>
JAX_EP_FN auto results_of(const OverlapWork<Args>& work) {
  using Spec = std::conditional_t<std::is_same_v<Args, MatmulExchangeArgs>, MatmulReduceArgs, Args>;
  return Results<Spec>(work.args, work.comm.size);
}

// Debug: some CTAs fill the results, before tiles are stored and peers may write. All warps call, before they multiply.
// The CTAs wait for each other, so all must find an SM.
template <class Args>
JAX_EP_FN void poison_results(const OverlapWork<Args>& work, int first_cta, int ctas) {
  const Role role = whole_ctas(first_cta, ctas);
  if (!work.comm.poison || !role.is_mine()) return;
  const Coop coop = role.coop();
  Op(work.comm, coop, kind_of(work.args)).poison(results_of(work));
}

// Waits until a tile of this CTA is written. `written` has a counter for each multiplying warp.
JAX_EP_FN void wait_written(const uint32_t (&written)[gemm::kConsumerWarps], int block_n, int tile) {
  const gemm::Storing by = gemm::storing(block_n, tile);
  ptx::wait_counts(written + by.first, by.warps, by.tiles);
}

template <class Args>
struct Operands {
  const CUtensorMap &lhs, &rhs, &out_map;
  const OwnMap<Args>& own;
  void* out;
  const gemm::Problem& problem;
};

template <class In, class Out, int kBlockN, bool kMnB, class Args, class Hooks>
JAX_EP_FN void multiply_tiles(char* memory, const Operands<Args>& operands, const Hooks& hooks) {
  using Mainloop = gemm::TileMainloop<In, kBlockN, false, kMnB>;
  gemm::run_matmul<Mainloop>(memory, typename Mainloop::Source(operands.lhs, operands.rhs),
                             gemm::StoreTile<Out>(operands.out_map, operands.out), operands.problem, hooks,
                             gemm::this_cta());
}

// The shared memory of a CTA's aux warps. aux_of() is only declared, for each op.
template <class Args>
using AuxOf = decltype(aux_of(Args{}));

template <class In, class Out, int kBlockN, bool kMnB, class Args>
JAX_EP_FN void run_overlapped(char* memory, const Operands<Args>& operands, const OverlapWork<Args>& work);

static_assert(kBlockRows == gemm::kBlockM, "a flag stands for whole tiles");

struct Waiter {
  uint32_t ready;  // tiles whose rows have arrived
};
Waiter aux_of(const AllGatherMatmulArgs&);

// A gather. One warp of every CTA waits for the rows of the CTA's tiles, and in some CTAs two more warps push this
// rank's rows. They take parts by ticket, so peers get all rows even if few of these CTAs run. A tile reads own rows
// from the operand, and other rows from `gathered`.
struct GatherHooks {
  static constexpr bool kAwaitStores = false;
  using Aux = Waiter;
  const OverlapWork<AllGatherMatmulArgs>& work;
  const CUtensorMap& own;
  const gemm::Problem& problem;
  Waiter& aux;
  mutable uint32_t awaited = 0;  // tiles, by the producer

  JAX_EP_FN gemm::Rows before_tile(const gemm::Tile& tile, const CUtensorMap& gathered) const {
    if (must_wait(tile)) ptx::wait_count(&aux.ready, ++awaited);
    if (is_own(tile)) return {own, tile.row - work.comm.rank * work.args.m};
    return {gathered, tile.row};
  }
  JAX_EP_FN void after_tile(const gemm::Tile&, int) const {}
  JAX_EP_FN void after_last(const gemm::Tile&, int, int) const {}
  // At the end one warp finishes the op for all multiplying warps of its CTA.
  enum { kWaiters, kPushers, kMultipliers };
  JAX_EP_FN Roles<3> roles() const {
    return {first_aux_warps(), other_aux_warps(work.first_communicating, work.communicating), one_warp_a_cta(0)};
  }
  JAX_EP_FN void run_aux(Part cta) const {
    const auto [number, role] = roles().mine();
    if (number < 0) return;
    const Coop coop = role.coop(/*is_tracked=*/number == kPushers);
    Op op(work.comm, coop, kind_of(work.args));
    if (number == kWaiters)
      await_rows(op, cta);
    else
      push(op);
    finish(op);
  }
  JAX_EP_FN void finish(Op& op) const { op.finish(results_of(work), roles().coops()); }

 private:
  JAX_EP_FN Range rows_of(const gemm::Tile& tile) const {
    return {tile.row, smaller(tile.row + gemm::kBlockM, work.args.m * work.comm.size)};
  }
  JAX_EP_FN bool is_own(const gemm::Tile& tile) const {
    const int first = work.comm.rank * work.args.m;
    return first <= rows_of(tile).begin && rows_of(tile).end <= first + work.args.m;
  }
  // Debug: every tile waits, because it must be stored after the result is poisoned, which a peer's flag implies.
  JAX_EP_FN bool must_wait(const gemm::Tile& tile) const { return !is_own(tile) || work.comm.poison; }

  JAX_EP_FN void await_rows(Op& op, Part cta) const {
    gemm::Schedule schedule(problem, work.block_n, cta);
    for (gemm::Tile tile; schedule.next(&tile);) {
      if (!must_wait(tile)) continue;
      wait_rows(op, work.args, rows_of(tile));
      ptx::proxy_fence();
      if (op.coop.lane == 0) ptx::count_one(&aux.ready);
    }
  }

  JAX_EP_FN void push(Op& op) const {
    op.post(window_addresses(work.args, work.comm.size));
    push_rows(op, work.args);
  }
};

template <class In, class Out, int kBlockN, bool kMnB>
JAX_EP_FN void run_overlapped(char* memory, const Operands<AllGatherMatmulArgs>& operands,
                              const OverlapWork<AllGatherMatmulArgs>& work) {
  poison_results(work, work.first_communicating, work.communicating);
  Waiter& aux = reinterpret_cast<gemm::Shared<kBlockN, Waiter>*>(memory)->aux;
  if (threadIdx.x == 0) aux.ready = 0;  // before the barrier of all warps
  const GatherHooks hooks{work, operands.own, operands.problem, aux};
  multiply_tiles<In, Out, kBlockN, kMnB>(memory, operands, hooks);
  if (threadIdx.x >= gemm::kConsumers) return;
  ptx::sync_some(1, gemm::kConsumers);  // all multiplying warps have written their tiles
  const auto [number, role] = hooks.roles().mine();
  if (number < 0) return;
  const Coop coop = role.coop();
  Op op(work.comm, coop, kind_of(work.args));
  hooks.finish(op);
}

constexpr int kReducerBytes = 128 + 8 * 2048;  // two batches to write, six to read

struct Reducers {
  alignas(128) char memory[kOtherAuxWarps][kReducerBytes];
  uint32_t written[gemm::kConsumerWarps];  // parts of tiles, by multiplying warp
};
Reducers aux_of(const MatmulReduceArgs&);

// A reduction. One warp of every CTA announces the tiles of its CTA, and in the last CTAs two more warps are reducers.
// So the product has all SMs, and all CTAs except the last ones free their SMs when the product is done.
//
// Reducers hold the SMs of their CTAs while they wait for peers. A GPU starts the last CTAs after all others. A reducer
// that does not see all reducers begin within 20 us leaves. The last reducer to begin never leaves, and the reducers
// that stay sum all rows. So a kernel that holds some SMs slows the sums down, but cannot stop them.
template <class T>
struct ReduceHooks {
  static constexpr bool kAwaitStores = true;
  using Aux = Reducers;
  const OverlapWork<MatmulReduceArgs>& work;
  const gemm::Problem& problem;
  Reducers& aux;

  JAX_EP_FN gemm::Rows before_tile(const gemm::Tile& tile, const CUtensorMap& a) const { return {a, tile.row}; }
  JAX_EP_FN void after_tile(const gemm::Tile&, int warp) const {
    if (threadIdx.x % Coop::lanes != 0) return;
    ptx::proxy_fence();
    ptx::count_one(&aux.written[warp]);
  }
  JAX_EP_FN void after_last(const gemm::Tile&, int, int) const {}
  JAX_EP_FN void run_aux(Part cta) const {
    enum { kAnnouncers, kReducers };
    const Roles<2> roles{first_aux_warps(), other_aux_warps(work.first_communicating, work.communicating)};
    const auto [number, role] = roles.mine();
    if (number < 0) return;
    const Coop coop = role.coop(/*is_tracked=*/number == kReducers, aux.memory[0], kReducerBytes);
    Op op(work.comm, coop, kind_of(work.args));
    if (number == kAnnouncers)
      announce(op, cta);
    else
      reduce(op);
    op.finish(results_of(work), roles.coops());
  }

 private:
  JAX_EP_FN void announce(Op& op, Part cta) const {
    const MatmulReduceArgs& args = work.args;
    const RowBlocks row_blocks(args.m);
    gemm::Schedule schedule(problem, work.block_n, cta);
    int tiles_seen = 0;
    for (gemm::Tile tile; schedule.next(&tile); ++tiles_seen) {
      wait_written(aux.written, work.block_n, tiles_seen);
      if (tile.row >= args.m || tile.col >= args.n) continue;
      const Range rows = row_blocks.chunk(row_blocks.chunk_of(tile.row));
      const int tiles = ceil_div(rows.end - rows.begin, gemm::kBlockM) * ceil_div(args.n, work.block_n) *
                        (problem.split_k ? gemm::kCluster : 1);
      op.deliver(row_blocks.chunk_of(tile.row), 1, tiles);
    }
  }

  JAX_EP_FN void reduce(Op& op) const {
    op.post(window_addresses(work.args, work.comm.size));
    const bool stays = all_begin(op.coop, &op.signal_pad->members, op.coop.count);
    if (stays) {
      op.wait_posted();
      MatmulReduce<T>(op, work.args).reduce();
    }
    conclude_reduction<T>(op, work.args);
    if (stays) wait_concluded(op, work.args);
  }
};

template <class In, class Out, int kBlockN, bool kMnB>
JAX_EP_FN void run_overlapped(char* memory, const Operands<MatmulReduceArgs>& operands,
                              const OverlapWork<MatmulReduceArgs>& work) {
  using Hooks = ReduceHooks<RowOf<Out>>;
  poison_results(work, work.first_communicating, work.communicating);
  Reducers& aux = reinterpret_cast<gemm::Shared<kBlockN, Reducers>*>(memory)->aux;
  if (threadIdx.x < gemm::kConsumerWarps) aux.written[threadIdx.x] = 0;  // before the barrier of all warps
  const Hooks hooks{work, operands.problem, aux};
  multiply_tiles<In, Out, kBlockN, kMnB>(memory, operands, hooks);
}

}  // namespace jax_ep
