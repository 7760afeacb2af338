// One kernel for a product and its reduction between two ranks. Both ranks take the same tiles in the same order, so
// every CTA exchanges tiles with the same CTA of the peer. Multiplying warps store their part of a tile here and at the
// peer. One aux warp announces tiles, and the others add the peer's tiles. The multiplying warps add the last tile.
#pragma once

#include "kernels/collective_matmul/overlap.h"
#include "kernels/collective_matmul/reduce.h"

namespace jax_ep {

struct Exchanged {
  char* landing;                           // at the peer, or null if nothing may be pushed
  uint32_t landing_known;                  // 1 once `landing` is set
  uint32_t written[gemm::kConsumerWarps];  // parts of tiles, by multiplying warp
  uint32_t added[gemm::kConsumerWarps];    // of the last tile
  uint32_t landed;                         // 1 once the peer's last tile has landed, or the op has failed
};
Exchanged aux_of(const MatmulExchangeArgs&);

// Tiles of a CTA are announced one by one, or a few at a time if there are too few flags.
struct TileFlags {
  int cta, ctas, tiles_per_flag;

  JAX_EP_FN TileFlags(const gemm::Problem& problem, int block_n, int cta, int ctas) : cta(cta), ctas(ctas) {
    const int tiles = ceil_div(problem.m, gemm::kBlockM) * ceil_div(problem.n, block_n);
    const int most = ceil_div(tiles * (problem.split_k ? gemm::kCluster : 1), ctas) + 1;
    tiles_per_flag = ceil_div(most, kMaxFlags / ctas);
  }
  JAX_EP_FN int flag(int tile) const { return tile / tiles_per_flag * ctas + cta; }
  JAX_EP_FN bool ends(int tile) const { return tile % tiles_per_flag == tiles_per_flag - 1; }
};

template <class Out, int kBlockN>
struct ExchangeHooks {
  static constexpr bool kAwaitStores = false;
  using Aux = Exchanged;
  using T = RowOf<Out>;

  const OverlapWork<MatmulExchangeArgs>& work;
  const gemm::Problem& problem;
  Exchanged& aux;
  int cta, ctas;
  MatmulExchange<T> exchange{work.comm, work.args};
  TileFlags flags{problem, kBlockN, cta, ctas};

  JAX_EP_FN gemm::Rows before_tile(const gemm::Tile& tile, const CUtensorMap& a) const { return {a, tile.row}; }

  template <int kWidth>
  JAX_EP_FN void store(const gemm::Problem&, const gemm::Tile& tile, const float (&d)[kWidth / 2],
                       char (*buffers)[gemm::kOutBytes], int strip, int lane) const {
    ptx::wait_count(&aux.landing_known, 1);
    T* const landing = reinterpret_cast<T*>(aux.landing);
    gemm::put_tile<Out, kWidth>(problem, tile, d, buffers, strip, lane, [&](int row, int column, const uint4& words) {
      if (exchange.keeps(row)) *reinterpret_cast<uint4*>(exchange.kept(row, column)) = words;
      if (landing && exchange.sends(row)) *reinterpret_cast<uint4*>(exchange.sent(landing, row, column)) = words;
    });
  }
  JAX_EP_FN void after_tile(const gemm::Tile&, int warp) const { count(&aux.written[warp]); }
  JAX_EP_FN void after_last(const gemm::Tile& tile, int tiles, int warp) const {
    const int row = tile.row + warp * gemm::kOutRows;
    ptx::wait_count(&aux.landed, 1);
    if (tiles > 0) {
      wait_written(aux.written, kBlockN, tiles - 1);
      exchange.add(one_warp_a_cta(this_warp()).coop(), {row, row + gemm::kOutRows}, {tile.out_col, tile.out_end});
    }
    count(&aux.added[warp]);
  }
  JAX_EP_FN void run_aux(Part) const {
    enum { kAnnouncers, kAdders };
    const Roles<2> roles{first_aux_warps(), other_aux_warps(0, ctas)};
    const auto [number, role] = roles.mine();
    if (number < 0) return;
    const Coop coop = role.coop();
    Op op(work.comm, coop, kind_of(work.args));
    if (number == kAnnouncers)
      announce_tiles(op);
    else
      add_tiles(op);
    op.finish(results_of(work), roles.coops());
  }

 private:
  JAX_EP_FN static void count(uint32_t* counter) {
    __syncwarp();
    if (threadIdx.x % Coop::lanes == 0) ptx::count_one(counter);
  }

  JAX_EP_FN void announce_tiles(Op& op) const {
    op.record_begin(cta == 0);
    if (cta == 0) op.post_by(true, window_addresses<MatmulReduceArgs>(work.args, work.comm.size));
    exchange.count_received(op, cta == 0);
    op.wait_posted();
    if (op.coop.lane == 0) aux.landing = op.ok() ? reinterpret_cast<char*>(exchange.landing(op)) : nullptr;
    count(&aux.landing_known);
    gemm::Schedule schedule(problem, kBlockN, {cta, ctas});
    int tiles = 0;
    for (gemm::Tile tile; schedule.next(&tile); ++tiles) {
      wait_written(aux.written, kBlockN, tiles);
      if (tile.last || flags.ends(tiles)) op.deliver(flags.flag(tiles), 1, 1);
    }
    if (tiles > 0) op.wait_delivered(exchange.peer, flags.flag(tiles - 1));
    count(&aux.landed);
    ptx::wait_counts(aux.added, gemm::kConsumerWarps, 1);
  }

  // Adds this warp's rows of every tile except the last, when the peer's tiles arrive.
  JAX_EP_FN void add_tiles(Op& op) const {
    const Range part = part_of(gemm::kBlockM, op.coop.in_cta.index, kOtherAuxWarps);
    gemm::Schedule schedule(problem, kBlockN, {cta, ctas});
    int tiles = 0;
    for (gemm::Tile tile; schedule.next(&tile); ++tiles) {
      if (tile.last) break;
      op.wait_delivered(exchange.peer, flags.flag(tiles));
      wait_written(aux.written, kBlockN, tiles);
      if (op.ok()) exchange.add(op.coop, {tile.row + part.begin, tile.row + part.end}, {tile.out_col, tile.out_end});
    }
  }
};

template <class In, class Out, int kBlockN, bool kMnB>
JAX_EP_FN void run_overlapped(char* memory, const Operands<MatmulExchangeArgs>& operands,
                              const OverlapWork<MatmulExchangeArgs>& work) {
  const int cta = blockIdx.x, ctas = gridDim.x;
  poison_results(work, 0, ctas);
  Exchanged& aux = reinterpret_cast<gemm::Shared<kBlockN, Exchanged>*>(memory)->aux;
  if (threadIdx.x == 0) aux = {};  // before the barrier of all warps
  const ExchangeHooks<Out, kBlockN> hooks{work, operands.problem, aux, cta, ctas};
  using Mainloop = gemm::TileMainloop<In, kBlockN, false, kMnB>;
  gemm::run_matmul<Mainloop>(memory, typename Mainloop::Source(operands.lhs, operands.rhs), /*epilogue=*/hooks,
                             operands.problem, hooks, {cta, ctas});
}

}  // namespace jax_ep
