// How a product is laid over the SMs: a pure function of its shape and of the number of SMs.
#pragma once

#include <string>

#include "gemm/problem.h"

namespace jax_ep::gemm {

// As in Product.
struct Shape {
  Grouping grouping;
  int m, n, k;
  int groups;
  Epilogue epilogue = Epilogue::store;
  bool is_float8 = false;
  Gathered gathered = Gathered::none;
};

struct Config {
  int block_n;  // tiles are kBlockM x block_n; if swap_ab, of at most so many rows and kTileColumns
  int band;     // see Problem
  int blocks;   // an even number
  bool split_k;
  bool swap_ab = false;  // tiles of no more rows than they need (multiply_swapped.h)

  std::string describe() const;
};

// Rates of a Hopper, measured on an H200.
struct Rates {
  int band = 8;  // pairs of rows of tiles, so that a wave is about square: gemm_bench sweep
  // Divided by the contraction: how many columns are multiplied in the time that 256 take to be stored. And how many in
  // the time that a tile waits for its operands. Both: gemm_bench sweep.
  int store_columns = 40000;
  int load_columns = 12;
  int least_split = 1024;  // a contraction that two CTAs share: gemm_bench time, products of 64 and 128 rows
};
constexpr Rates kRates;

Config plan(const Shape& shape, int sms);

// With tiles of fixed height, to which hooks can be added.
Config plan_fixed(const Shape& shape, int sms);

// Whether both CTAs of a cluster should take one tile, half of the contraction each: where there are so few tiles that
// this leaves none of `sms` without work.
bool should_split(int block_n, int k, int tiles, int sms);

}  // namespace jax_ep::gemm
