// How a product is laid over the processors: a pure function of its shape.
#pragma once

#include <string>

#include "gemm/problem.h"

namespace jax_ep::gemm {

struct Config {
  int block_n;  // tiles are kBlockM x block_n
  int band;     // see Problem
  int blocks;   // an even number
  bool split_k;

  std::string describe() const;
};

// Whether both blocks of a cluster should take one tile, half of the contraction each: where tiles are few.
bool should_split(int block_n, int k, int tiles, int processors);

Config choose_config(Grouping grouping, int m, int n, int k, int groups, int processors);

}  // namespace jax_ep::gemm
