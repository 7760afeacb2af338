// The main loops: where operands come from, how a stage is multiplied, and what the aux warps do. kernel.h runs one of
// them with an epilogue. runtime/cuda/grouped_matmul_tables.h and overlap_launch.h list the compiled kernels.
#pragma once

#include "gemm/gather.h"
#include "gemm/kernel.h"
#include "gemm/multiply.h"
#include "gemm/multiply_float8.h"
#include "gemm/multiply_swapped.h"

namespace jax_ep::gemm {

// Tiles of fixed height, of 16-bit operands. kMnA, kMnB: lhs is contiguous along m, rhs along n, instead of along k.
template <class In, int kBlockN, bool kMnA, bool kMnB>
using TileMainloop = Mainloop<TileSource<kMnA, OneMatrix<kBlockN, kMnB>>, MultiplyTiles<In, kBlockN, kMnA, kMnB>>;

// The same, if the contraction is gathered.
template <class In>
using GatheredContractionMainloop =
    Mainloop<RightSource<OneMatrix<kGatheredColumns, true>>, MultiplyTiles<In, kGatheredColumns, true, true>,
             Gather</*kContraction=*/true>>;

// Swapped operands. `Weights`: SwappedMatrix or SwappedGateAndUp.
template <class In, class Weights>
using SwappedMainloop = Mainloop<SwappedSource<Weights>, MultiplySwapped<In, Weights>>;

// The same, if rows are gathered. Gathered rows cannot be multicast, so the CTAs of a cluster split the rows of a tile
// pair, and share 256 columns of the weights, which are wide. A CTA has up to 128 rows, a warpgroup two slabs of 64
// columns. The traffic from the L2 cache is the same as without a gather.
template <class In, class Weights>
using GatheredRowsMainloop =
    Mainloop<WideSource<Weights>, MultiplySwapped<In, Weights>, Gather</*kContraction=*/false>>;

// float8.
using Float8Mainloop = Mainloop<Float8Source<OneMatrix<kFloat8Columns, false>>, MultiplyFloat8<kFloat8Columns>>;
using GatheredFloat8Mainloop = Mainloop<RightSource<OneMatrix<kFloat8Columns, false>>, MultiplyFloat8<kFloat8Columns>,
                                        Gather</*kContraction=*/false>>;
using GatedFloat8Mainloop = Mainloop<Float8Source<GateAndUpBlocks>, MultiplyGatedFloat8, LoadScales>;

}  // namespace jax_ep::gemm
