// Products whose left operand is gathered (gather.h).
//
// Rows of 16 bits: the operands are swapped (multiply_swapped.h). Gathered rows cannot be multicast, so the CTAs of a
// cluster split the rows of a tile pair, and share 256 columns of the weights by multicast. A CTA has up to 128 rows, a
// warpgroup two slabs of 64 columns. The L2 cache delivers as many bytes as without a gather.
//
// Contractions, and rows of float8: tiles of fixed height (multiply.h, multiply_float8.h). The CTAs of a cluster share
// the right operand.
#pragma once

#include "gemm/gather.h"
#include "gemm/multiply_float8.h"
#include "gemm/multiply_swapped.h"

namespace jax_ep::gemm {

// TMA loads the weights if rows are gathered and operands swapped. The CTAs of a cluster have the same weights and
// different rows.
template <class WeightsOf>
struct WideSource {
  using Weights = WeightsOf;
  static constexpr int kTerms = 1, kColumns = Weights::kColumns;
  static constexpr bool kGathersContraction = false;
  static constexpr int kGatheredSlice = Weights::kSlices;  // the first in a stage

  const GroupedMatmul& product;
  Weights weights;

  JAX_EP_FN WideSource(const Maps& maps, const GroupedMatmul& product) : product(product), weights{maps, product} {}
  JAX_EP_FN static int stage_k(const RowTile&) { return kBlockK; }

  template <class Hooks>
  JAX_EP_FN int open(const Problem& problem, const RowTile& tile, const Hooks&) const {
    return weights.slices(problem, tile);
  }
  JAX_EP_FN void load(char* stage, const Problem& /*problem*/, const RowTile& tile, int slices, int /*term*/, int k,
                      int cta_in_cluster, uint64_t* full) const {
    if (!elect_lane()) return;
    ptx::arrive_expecting(full, slices * kSliceBytes);
    weights.load(stage, tile, 0, k, slices, cta_in_cluster, full);
  }
  JAX_EP_FN static int rows_of(const RowTile& tile) { return tile.rows; }
};

// TMA loads the right operand in tiles of fixed height.
template <class Rhs, bool kContraction>
struct RightSource {
  static constexpr int kTerms = 1, kGatheredSlice = 0;
  static constexpr bool kGathers = true, kGathersContraction = kContraction;

  const GroupedMatmul& product;
  Rhs rhs;

  JAX_EP_FN RightSource(const Maps& maps, const GroupedMatmul& product) : product(product), rhs(maps, product) {}
  JAX_EP_FN static int stage_k(const Tile&) { return kBlockK; }

  template <class Hooks>
  JAX_EP_FN int open(const Problem& problem, const Tile& tile, const Hooks&) const {
    return rhs.slices(problem, tile);
  }
  JAX_EP_FN void load(char* stage, const Problem& problem, const Tile& tile, int slices, int /*term*/, int k,
                      int cta_in_cluster, uint64_t* full) const {
    if (!elect_lane()) return;
    ptx::arrive_expecting(full, slices * kSliceBytes);
    rhs.load(stage + kSlicesA * kSliceBytes, problem, tile, k, slices, cta_in_cluster, full);
  }
  JAX_EP_FN static int rows_of(const Tile& tile) { return tile.row_end - tile.row; }
};

// `Weights`: SwappedMatrix or SwappedGateAndUp, wide.
template <class In, class Weights>
struct GatheredRowsMainloop : SwappedMainloop<In, WideSource<Weights>> {
  using Source = WideSource<Weights>;
  using Shared = GatheredMemory<SwappedMemory>;
  template <class Aux>
  using Memory = Shared;
  static constexpr bool kGathers = true;
  static constexpr int kProducers = 2;  // one is the announcing warp

  JAX_EP_FN static void open(Shared& shared) {
    if (threadIdx.x != 0) return;
    open_queue(shared.queue, kConsumerWarps + 1 + kAuxWarps);
    shared.open_gather();
  }
  JAX_EP_FN static void assist(Shared& shared, const Source& source, const Problem& problem, Part cta, int aux_warp) {
    assist_gathering<GatheredRowsMainloop>(shared, source, problem, cta, aux_warp);
  }
};

// A main loop of tiles of fixed height whose rows or contraction are gathered.
template <class Base, int kBlockN>
struct GatheredTiles : Base {
  using Source = typename Base::Source;
  using Shared = GatheredMemory<gemm::Shared<kBlockN>>;
  template <class Aux>
  using Memory = Shared;
  static constexpr bool kGathers = true;
  static constexpr int kProducers = 2;

  JAX_EP_FN static void open(Shared& shared) {
    if (threadIdx.x == 0) shared.open_gather();
  }
  JAX_EP_FN static void assist(Shared& shared, const Source& source, const Problem& problem, Part cta, int aux_warp) {
    assist_gathering<GatheredTiles>(shared, source, problem, cta, aux_warp);
  }
};

using GatheredFloat8Source = RightSource<OneMatrix<kFloat8Columns, false>, false>;
using GatheredFloat8Mainloop = GatheredTiles<Float8Mainloop<kFloat8Columns, GatheredFloat8Source>, kFloat8Columns>;

using ContractionSource = RightSource<OneMatrix<kGatheredColumns, true>, true>;
template <class In>
using ContractionTiles =
    GatheredTiles<TileMainloop<In, kGatheredColumns, true, true, ContractionSource>, kGatheredColumns>;

template <class In>
struct GatheredContractionMainloop : ContractionTiles<In> {
  using Base = ContractionTiles<In>;
  using Shared = typename Base::Shared;
  template <class Epilogue>
  JAX_EP_FN static void store(const Epilogue& epilogue, const typename Base::Accumulators& d, Shared& shared,
                              const Problem& problem, const Tile& tile, int& stored, int warp, int lane) {
    if constexpr (!Epilogue::kTransposes)
      return Base::store(epilogue, d, shared, problem, tile, stored, warp, lane);
    else
#pragma unroll
      for (int slab = 0; slab < kRowSlabs<kGatheredColumns>; ++slab)
        epilogue.template store<kGatheredColumns>(problem, tile, d[slab], slab, shared, stored, warp, lane);
  }
};

}  // namespace jax_ep::gemm
