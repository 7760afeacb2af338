// How the tiles of a product are laid over the SMs: a pure function of the product's shape and the number of SMs.
#pragma once

#include <string>

#include "gemm/problem.h"

namespace jax_ep::gemm {

struct Shape {
  Grouping grouping;
  int m, n, k;
  int groups;
  Formula formula = Formula::store;
  bool is_float8 = false;
  Gathered gathered = Gathered::none;
};

struct Config {
  int block_n;  // tiles are kBlockM x block_n; if swap_ab, at most block_n rows x kTileColumns
  int band;     // see Problem
  int ctas;     // an even number
  bool split_k;
  bool swap_ab = false;    // tiles have no more rows than they need (multiply_swapped.h)
  bool is_static = false;  // if swap_ab: every cluster knows its tiles, and there is no queue (tile_queue.h)

  std::string describe() const;
};

// Measured on an H200, and used for every Hopper, as kernels/hardware_model.h says of all rates.
struct Rates {
  int band = 8;  // pairs of rows of tiles, so that a wave is about square: gemm_bench sweep
  // By gemm_bench sweep. store_columns / k is how many columns are multiplied while 256 columns are stored;
  // load_columns is how many are multiplied while a tile waits for its operands.
  int store_columns = 40000;
  int load_columns = 12;
  int least_split = 1024;  // the least k that two CTAs split: gemm_bench time, products of 64 and 128 rows
};
constexpr Rates kH200ProductRates;

Config plan_tiles(const Shape& shape, int sms);

// A plan with tiles of fixed height. Only such products can have hooks (loop.h).
Config plan_fixed(const Shape& shape, int sms);

// Whether tiles are so few that each can have two of the `sms`. Then both CTAs of a cluster take one tile, and half of
// the contraction each.
bool should_split(int block_n, int k, int tiles, int sms);

}  // namespace jax_ep::gemm
