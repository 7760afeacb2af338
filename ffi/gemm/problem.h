// A kernel's problem, for host and device: shapes, groups, and a tile.
#pragma once

#include <cstdint>

#include "comm/integers.h"
#include "gemm/grouped_matmul.h"

namespace jax_ep::gemm {

constexpr int kBlockM = 128;
constexpr int kBlockK = 64;            // 16-bit values
constexpr int kSlice = 64;             // rows of an operand in one load of kBlockK
constexpr int kFloat8Columns = 192;    // in float8: the sums of the tile and of a block fill the registers
constexpr int kGatheredColumns = 192;  // if the contraction is gathered: gemm_bench gathers
constexpr int kCluster = 2;            // CTAs: two adjacent tiles, which share an operand

struct Problem {
  Grouping grouping;
  int m, n, k;  // k counts 16-bit values: two values of float8 are one
  int groups;
  const int32_t* group_sizes;
  int band;  // successive tiles stay within this many pairs of rows, for the L2 cache
  // Without groups, a collective may need some rows first. The schedule begins with `pair_lead` pairs of rows of tiles
  // from `pair_first` on. The other pairs are cut into `pair_parts` equal parts, which take turns.
  int pair_first = 0, pair_lead = 0, pair_parts = 1;
  bool split_k = false;  // both CTAs of a cluster take the same tile, half of the contraction each
  uint64_t matrix = 0;   // of a group: matrix_of() its shape, for the timeline
};

// The shape of a matrix in 48 bits, for events of the timeline.
constexpr int kMatrixRowsBit = 24;
inline uint64_t matrix_of(int rows, int columns) { return static_cast<uint64_t>(rows) << kMatrixRowsBit | columns; }

// What the tiles of a cluster's two CTAs share.
enum class Common { lhs, rhs, tile };

// One step of a CTA: out[row.., col..] of one matrix, over [k_begin, k_end) of the contraction.
struct Tile {
  int group;
  int row, col;
  int row_end;  // rows from here on belong to other groups
  int k_begin, k_end;
  Common common;         // rhs: the cluster's other tile is above or below; lhs: it is to the side
  int out_col, out_end;  // the columns that this CTA stores
  bool last;             // of the CTA's tiles, if there are no groups
};

}  // namespace jax_ep::gemm
