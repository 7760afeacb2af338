// How an op is launched, on rows or with a product and a collective. A plan is a pure function of the op's shape and of
// the device; its rates are measured, not derived.
#pragma once

#include <string>

#include "kernels/hardware_model.h"
#include "kernels/ops.h"

namespace jax_ep {

struct GatherMatmulArgs;
struct MatmulReduceArgs;

struct RowShape {
  OpKind op;
  int ranks;
  int num_tokens;  // or entries, or the rows that the op zeroes at least
  bool encoded;    // rows travel in float8
};

// There are few blocks, as they wait for peers, and other kernels must find room beside them. In each block the first
// warps are senders, which push rows to peers. The others are receivers, which take in what arrives.
struct LaunchConfig {
  int blocks;  // a block takes a whole SM
  int threads;
  int senders_per_cta;
  int warp_bytes;  // of shared memory, for each warp's stages

  std::string describe() const;
};

LaunchConfig plan(const RowShape& shape, const HardwareModel& model);

// A product with a collective. m, n, k are those of the product that one rank computes. A gather's product has the rows
// of all ranks.
struct ProductShape {
  OpKind op;
  int m, n, k;
  int value_bytes;  // of what travels: a gather's operand, a reduction's result
  int ranks;
};

ProductShape shape_of(const GatherMatmulArgs& args, int ranks);
ProductShape shape_of(const MatmulReduceArgs& args, int ranks);

struct OverlapConfig {
  int block_n;          // tiles are 128 x block_n
  int band;             // pairs of rows of tiles that are computed before the next ones
  bool split_k;         // two blocks a tile, half of the contraction each
  int communicating;    // blocks, an even number; of a reduction none where all push their tiles
  int multiplying;      // blocks, an even number; those that communicate are among them, or the reverse
  double microseconds;  // expected

  int blocks() const;

  std::string describe() const;
};

OverlapConfig plan(const ProductShape& shape, const HardwareModel& model);

// The best plan with this block_n and this number of blocks that communicate. 0 blocks: all blocks exchange their
// tiles, which a reduction of two ranks may do.
OverlapConfig plan_with(const ProductShape& shape, const HardwareModel& model, int block_n, int communicating);

// In which order pairs of rows of tiles are computed: see gemm::Problem.
struct PairOrder {
  int first = 0, lead = 0, parts = 1;
};
// Pairs with rows of this rank only come first. Those of the other ranks follow in turns, as they arrive. m: rows of
// one rank.
PairOrder own_rows_first(int m, int rank, int ranks);

}  // namespace jax_ep
