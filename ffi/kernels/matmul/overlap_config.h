// How an overlapped product is laid over the processors: a pure function of its shape, from measured rates.
#pragma once

#include <string>

#include "kernels/matmul/args.h"

namespace jax_ep {

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

// For all_gather_matmul; m, n, k: of the product that a rank computes.
OverlapConfig choose_gather(int m, int n, int k, int value_bytes, int ranks, int processors);

// The same with some of it given: block_n, and how many blocks communicate.
OverlapConfig gather_with(int m, int n, int k, int value_bytes, int ranks, int processors, int block_n,
                          int communicating);

// The same for the reductions. Two ranks may have no blocks that communicate: then all exchange their tiles.
OverlapConfig choose_reduce(OpKind op, int m, int n, int k, int value_bytes, int ranks, int processors);
OverlapConfig reduce_with(OpKind op, int m, int n, int k, int value_bytes, int ranks, int processors, int block_n,
                          int communicating);

// How many blocks push, an even number of `most` at the most: the fewer the more peers each pushes to. What more would
// push queues up in the way of the product's loads.
int pushing_blocks(int blocks_times_peers, int ranks, int most);

// In which order pairs of rows of tiles are computed: see gemm::Problem.
struct PairOrder {
  int first = 0, lead = 0, parts = 1;
};
// Those wholly of this rank's rows first, then the others' in turns, as they come. m: rows of one rank.
PairOrder own_rows_first(int m, int rank, int ranks);

}  // namespace jax_ep
