// How a product with a collective is laid over the SMs: a pure function of its shape and of the device, from measured
// rates.
#pragma once

#include <string>

#include "comm/hardware_model.h"
#include "kernels/matmul/args.h"

namespace jax_ep {

// m, n, k: of the product that a rank computes; a gather's has the rows of all ranks.
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

// The best plan with given block_n and number of blocks that communicate. A reduction of two ranks may have none: then
// all exchange their tiles.
OverlapConfig plan_with(const ProductShape& shape, const HardwareModel& model, int block_n, int communicating);

// In which order pairs of rows of tiles are computed: see gemm::Problem.
struct PairOrder {
  int first = 0, lead = 0, parts = 1;
};
// Pairs of this rank's rows alone come first, then those of the other ranks in turns, as they arrive. m: rows of one
// rank.
PairOrder own_rows_first(int m, int rank, int ranks);

// What plan and plan_with consist of, for plan*.cc alone.
namespace plans {

constexpr int kTileRows = 128;

OverlapConfig gather(const ProductShape& shape, HardwareModel model);
OverlapConfig gather_with(const ProductShape& shape, const HardwareModel& model, int block_n, int communicating);
OverlapConfig reduce(const ProductShape& shape, HardwareModel model);
OverlapConfig reduce_with(const ProductShape& shape, const HardwareModel& model, int block_n, int communicating);

// How many blocks push, an even number of `most` at the most: the fewer the more peers each pushes to. What more would
// push queues up in the way of the product's loads.
int pushing_blocks(int blocks_times_peers, int ranks, int most);

}  // namespace plans
}  // namespace jax_ep
