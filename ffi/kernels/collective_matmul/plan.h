// The launch of a collective matmul.
#pragma once

#include <string>

#include "kernels/collective_matmul/args.h"
#include "kernels/hardware_model.h"

namespace jax_ep {

// A rank computes m by n by k. In a gather, m is the rows of all ranks.
struct CollectiveMatmulShape {
  OpKind op;
  int m, n, k;
  int value_bytes;  // that travel: of a gather's operand, a reduction's result
  int ranks;
};

CollectiveMatmulShape shape_of(const AllGatherMatmulArgs& args, int ranks);
CollectiveMatmulShape shape_of(const MatmulReduceArgs& args, int ranks);

// A launch has max(communicating, multiplying) CTAs, so a CTA may do both. In a gather the first `communicating` CTAs
// push rows. In a reduction the last `communicating` CTAs fetch and sum. 0 means that two ranks exchange, and all CTAs
// push their tiles.
struct OverlapConfig {
  int block_n;          // tiles are 128 x block_n
  int band;             // pairs of rows of tiles that are computed before the next ones
  bool split_k;         // two CTAs a tile, half of the contraction each
  int communicating;    // CTAs, an even number
  int multiplying;      // CTAs, an even number
  double microseconds;  // expected

  int ctas() const;
  std::string describe() const;
};

OverlapConfig plan_overlap(const CollectiveMatmulShape& shape, const HardwareModel& model);

// The best plan with this block_n and this number of communicating CTAs.
OverlapConfig plan_overlap_with(const CollectiveMatmulShape& shape, const HardwareModel& model, int block_n,
                                int communicating);

// The order in which pairs of rows of tiles are computed: see gemm::Problem.
struct PairOrder {
  int first = 0, lead = 0, parts = 1;
};
// Pairs with only rows of this rank come first. Pairs of the other ranks follow, one of each rank in turn, as their
// rows arrive. m: rows of one rank.
PairOrder own_rows_first(int m, int rank, int ranks);

}  // namespace jax_ep
