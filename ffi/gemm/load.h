// The producer's side of the Hopper kernel: where a tile's operands are, the pipeline of stages, and one warp that
// fills it by TMA.
#pragma once

#include "gemm/layout.h"
#include "gemm/ptx/cluster.h"
#include "gemm/ptx/tma.h"
#include "gemm/ptx/warps.h"
#include "gemm/schedule.h"

namespace jax_ep::gemm {

// From where to load a's part of a tile: in the coordinates of the map, which need not be those of the whole product.
struct Rows {
  const CUtensorMap& map;
  int first;
};

template <int kBlockN, class Hooks>
using SharedFor = Shared<kBlockN, typename Hooks::Aux>;

// A stage of the pipeline and how often it came round.
template <int kStages>
struct Position {
  int stage = 0;
  uint32_t parity = 0;

  JAX_EP_FN void advance() {
    if (++stage < kStages) return;
    stage = 0;
    parity ^= 1;
  }
  JAX_EP_FN void advance(int stages) {
    stage += stages;
    parity ^= stage / kStages & 1;
    stage %= kStages;
  }
};

// This CTA's slices of an operand, of which the first `wanted` are: all, or half of them for both CTAs of the cluster,
// of an odd number one more every other step. What lies wholly outside is not even filled with zeros, for which TMA
// takes its time.
template <bool kMn, int kSlices>
JAX_EP_FN void load_slices(char* to, const CUtensorMap& map, int row, int k, int matrix, int wanted, bool once,
                           bool shared, int rank, uint64_t* barrier) {
  const int half = kSlices % 2 ? kSlices / 2 + (k / kBlockK & 1) : kSlices / 2;  // the first of both CTAs'
  const int begin = shared && rank == 1 ? half : 0, end = shared && rank == 0 ? half : kSlices;
#pragma unroll
  for (int slice = 0; slice < kSlices; ++slice) {
    if (slice < begin || slice >= end || slice >= wanted) continue;
    const int first = row + slice * kSlice;
    const Corner at = kMn ? Corner{first, k, matrix} : Corner{k, first, matrix};
    if (shared)
      load_box_to(0b11, to + slice * kSliceBytes, map, at, barrier);
    else if (once)
      load_box_once(to + slice * kSliceBytes, map, at, barrier);
    else
      load_box(to + slice * kSliceBytes, map, at, barrier);
  }
}

// Slices of b with columns in them. Wide tiles load what lies outside as zeros.
template <int kBlockN>
JAX_EP_FN int slices_of_columns(int columns) {
  constexpr int kSlices = kBlockN / kSlice;
  return kHasEdges<kBlockN> ? larger(0, smaller(ceil_div(columns, kSlice), kSlices)) : kSlices;
}

// A right operand of one matrix, or one per group.
template <int kBlockN, bool kMn>
struct Columns {
  static constexpr int kColumns = kBlockN;
  const CUtensorMap& map;

  // How many slices of 64 columns of a tile are loaded.
  JAX_EP_FN int slices(const Problem& problem, const Tile& tile) const {
    return slices_of_columns<kBlockN>(problem.n - tile.col);
  }
  JAX_EP_FN void load(char* to, const Problem& problem, const Tile& tile, int k, int wanted, int rank,
                      uint64_t* full) const {
    const int matrix = problem.grouping == Grouping::m_grouped ? tile.group : 0;
    load_slices<kMn, kBlockN / kSlice>(to, map, tile.col, k, matrix, wanted, /*once=*/problem.m <= kBlockM,
                                       tile.common == Common::b, rank, full);
  }
};

// Fills the stages of all tiles of a CTA. `b`: Columns, or alike.
template <bool kMnA, class Memory, class B, class Hooks>
__device__ void produce(Memory& shared, const CUtensorMap& a, const B& b, const Problem& problem, const Hooks& hooks,
                        Share share) {
  const int rank = blockIdx.x % kCluster;
  Position<Memory::kStages> at;
  Schedule schedule(problem, B::kColumns, share);
  for (Tile tile; schedule.next(&tile);) {
    const Rows rows = hooks.before_tile(tile, a);
    const int slices_a = larger(0, smaller(ceil_div(tile.row_end - tile.row, kSlice), kSlicesA));  // with rows in them
    const int slices_b = b.slices(problem, tile);
    for (int k = tile.k_begin; k < tile.k_end; k += kBlockK, at.advance()) {
      char* const stage = shared.stages[at.stage];
      uint64_t* const full = &shared.full[at.stage];
      wait_barrier(&shared.empty[at.stage], at.parity ^ 1, "an empty stage");
      if (!elect_lane()) continue;
      ptx::arrive_expecting(full, (slices_a + slices_b) * kSliceBytes);
      load_slices<kMnA, kSlicesA>(stage, rows.map, rows.first, k, 0, slices_a, /*once=*/false, tile.common == Common::a,
                                  rank, full);
      b.load(stage + kSlicesA * kSliceBytes, problem, tile, k, slices_b, rank, full);
    }
  }
  // Until the peer's consumers have released every stage: then nobody writes into this CTA's shared memory.
  for (int stage = 0; stage < Memory::kStages; ++stage, at.advance())
    wait_barrier(&shared.empty[at.stage], at.parity ^ 1, "the last of both CTAs' consumers");
}

}  // namespace jax_ep::gemm
