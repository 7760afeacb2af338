// What a matrix product is, for host and device: shapes, groups, and how its tiles are walked.
#pragma once

#include <cstdint>

#include "comm/integers.h"

namespace jax_ep::gemm {

constexpr int kBlockM = 128;
constexpr int kBlockK = 64;
constexpr int kCluster = 2;  // CTAs that compute two neighbouring tiles and share what both load

// What the groups divide. Group g is the g-th of consecutive ranges whose sizes lie on the device.
enum class Grouping {
  none,       // out [m, n] = a [m, k] x b [k, n]
  m_grouped,  // out [m, n]: its rows in group g are a's rows there x b[g]; rows behind the last group are zero
  k_grouped,  // out [g, m, n] = a's columns in group g [m, ...] x b's rows in group g [..., n]
};

struct Problem {
  Grouping grouping;
  int m, n, k;  // m-grouped: m is that of all groups; k-grouped: k is
  int groups;
  const int32_t* group_sizes;
  int band;  // tiles that follow each other stay within this many pairs of rows, for the sake of the L2 cache
  // Without groups, pairs of rows of tiles come in another order where a collective wants some rows first: so many from
  // `pair_first` on, then those of so many equal parts of the others in turns.
  int pair_first = 0, pair_lead = 0, pair_parts = 1;
  bool split_k = false;  // both CTAs of a cluster take the same tile, half of the contraction each
};

// Which part of the tiles a CTA takes: that of one of `ctas`.
struct Share {
  int cta, ctas;
};

// What the tiles of a cluster's two CTAs have in common.
enum class Common { a, b, tile };

// A CTA's share of one step: out[row.., col..] of one matrix, from the range [k_begin, k_end) of the contraction.
struct Tile {
  int group;
  int row, col;
  int row_end;  // rows from here on belong to others
  int k_begin, k_end;
  Common common;         // b: the cluster's other tile is above or below; a: at its side
  int out_col, out_end;  // the columns that this CTA stores
  bool last;             // of its CTA, if there are no groups
};

}  // namespace jax_ep::gemm
