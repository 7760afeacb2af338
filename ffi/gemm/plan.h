// How a product is laid over the SMs: a pure function of its shape and of the device.
#pragma once

#include <string>

#include "comm/hardware_model.h"
#include "gemm/problem.h"

namespace jax_ep::gemm {

// As in Product.
struct Shape {
  Grouping grouping;
  int m, n, k;
  int groups;
  Epilogue epilogue = Epilogue::store;
  bool is_float8 = false;
};

struct Config {
  int block_n;  // tiles are kBlockM x block_n
  int band;     // see Problem
  int blocks;   // an even number
  bool split_k;
  bool swap_ab = false;  // tiles of no more rows than they need (multiply_swapped.h)

  std::string describe() const;
};

Config plan(const Shape& shape, const HardwareModel& model);

// With tiles of fixed height, to which hooks can be added.
Config plan_fixed(const Shape& shape, const HardwareModel& model);

// Whether both CTAs of a cluster should take one tile, half of the contraction each: where there are so few tiles that
// this leaves none of `sms` without work.
bool should_split(const GemmRates& rates, int block_n, int k, int tiles, int sms);

}  // namespace jax_ep::gemm
