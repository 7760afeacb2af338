// How the tiles of a product are mapped to the SMs: a pure function of the product's shape and the number of SMs.
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
  bool swap_ab = false;    // tiles of varying height (multiply_swapped.h)
  bool is_static = false;  // if swap_ab: a fixed order instead of the counter (tile_queue.h)

  std::string describe() const;
};

// Measured on an H200, and used for every Hopper, as kernels/hardware_model.h says of all rates.
struct Rates {
  int band = 8;  // pairs of rows of tiles, so that a wave is about square: gemm_bench sweep
  // By gemm_bench sweep. store_columns / k: columns multiplied while 256 columns are stored. load_columns: columns
  // multiplied while a tile waits for its operands.
  int store_columns = 40000;
  int load_columns = 12;
  int least_split = 1024;  // least k to split: gemm_bench time, 64 and 128 rows
};
constexpr Rates kH200ProductRates;

Config plan_tiles(const Shape& shape, int sms);

// A plan with tiles of fixed height, which hooks need (kernel.h).
Config plan_fixed(const Shape& shape, int sms);

// Whether each tile can have two of the `sms`. Then both CTAs of a cluster take one tile, and half of its contraction
// each.
bool should_split(int block_n, int k, int tiles, int sms);

}  // namespace jax_ep::gemm
