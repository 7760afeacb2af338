// The GEMM core of these tests: a product in float32 whose warps call the hooks of a collective as ffi/gemm/kernel.h
// does. The producer warp copies the rows of a tile, and then counts the tile as loaded. The consumer warps wait for
// that count. With split_k both CTAs of a cluster take one tile, and each stores half of its columns, over the whole
// contraction. Arguments that are not used are there for the signatures.
#pragma once

#include <algorithm>
#include <cassert>

#include "comm/platform/ptx/cta.h"
#include "gemm/layout.h"
#include "gemm/schedule.h"

// A matrix in row-major order.
struct CUtensorMap {
  const float* values = nullptr;
  int rows = 0, columns = 0;
};
struct uint4 {
  float values[4];
};
struct __nv_bfloat16 {};
struct __half {};

namespace jax_ep::gemm {

struct Rows {
  const CUtensorMap& map;
  int first;
};

constexpr int kMaxTiles = 640, kMaxK = 24;  // limits of these tests: the tiles of a CTA, and k

template <int kBlockN, class Aux>
struct Shared {
  float lhs[kMaxTiles][kBlockM][kMaxK];
  uint32_t loaded[kMaxTiles];
  char out[kConsumerWarps][1][kOutBytes];
  Aux aux;
};

template <class In, int kColumns, bool kMnA, bool kMnB>
struct TileMainloop {
  static constexpr int kBlockN = kColumns;
  struct Source {
    const CUtensorMap &lhs, &rhs;
    Source(const CUtensorMap& lhs, const CUtensorMap& rhs) : lhs(lhs), rhs(rhs) {}
  };
};

// A strip has one lane, and its sums are in `buffers`.
template <class Out, int kWidth, class Put>
void put_tile(const Problem& problem, const Tile& tile, const float (&)[kWidth / 2], char (*buffers)[kOutBytes],
              int strip, int /*lane*/, Put put) {
  const auto* const sums = reinterpret_cast<const float*>(buffers[0]);
  for (int i = 0; i < kOutRows; ++i)
    for (int j = 0; j < kWidth; j += 4) {
      const int row = tile.row + strip * kOutRows + i, column = tile.out_col + j;
      if (row < tile.row_end && column < problem.n)
        put(row, column, *reinterpret_cast<const uint4*>(sums + i * kWidth + j));
    }
}

template <class Out>
struct StoreTile {
  Out* out;
  StoreTile(const CUtensorMap&, void* out) : out(static_cast<Out*>(out)) {}

  template <int kWidth>
  void store(const Problem& problem, const Tile& tile, const float (&d)[kWidth / 2], char (*buffers)[kOutBytes],
             int strip, int lane) const {
    put_tile<Out, kWidth>(problem, tile, d, buffers, strip, lane, [&](int row, int column, const uint4& words) {
      std::copy_n(words.values, 4, out + int64_t{row} * problem.n + column);
    });
  }
};

// Multiplies and stores a strip of a tile.
template <int kWidth, class Epilogue>
void store_strip(const float (&lhs)[kBlockM][kMaxK], const CUtensorMap& rhs, const Epilogue& epilogue,
                 const Problem& problem, const Tile& tile, char (*buffers)[kOutBytes], int strip) {
  auto* const sums = reinterpret_cast<float*>(buffers[0]);
  for (int i = 0; i < kOutRows; ++i)
    for (int j = 0; j < kWidth; ++j) {
      float sum = 0;
      if (tile.out_col + j < problem.n)
        for (int k = 0; k < problem.k; ++k)
          sum += lhs[strip * kOutRows + i][k] * rhs.values[k * problem.n + tile.out_col + j];
      sums[i * kWidth + j] = sum;
    }
  const float unused[kWidth / 2] = {};
  epilogue.template store<kWidth>(problem, tile, unused, buffers, strip, 0);
}

template <class Mainloop, class Epilogue, class Hooks>
void run_matmul(char* memory, const typename Mainloop::Source& source, const Epilogue& epilogue, const Problem& problem,
                const Hooks& hooks, Part cta) {
  constexpr int kBlockN = Mainloop::kBlockN;
  auto& shared = *reinterpret_cast<Shared<kBlockN, typename Hooks::Aux>*>(memory);
  const int warp = threadIdx.x;
  assert(problem.k <= kMaxK && problem.n % 4 == 0);
  ptx::sync_some(0, kThreads);
  if (warp > kConsumerWarps) return hooks.run_aux(cta);
  Schedule schedule(problem, kBlockN, cta);
  Tile tile{};
  int taken = 0;
  for (; schedule.next(&tile); ++taken) {
    assert(taken < kMaxTiles);
    if (warp == kConsumerWarps) {
      const Rows rows = hooks.before_tile(tile, source.lhs);
      for (int i = 0; i < std::min(kBlockM, rows.map.rows - rows.first); ++i)
        std::copy_n(rows.map.values + (rows.first + i) * problem.k, problem.k, shared.lhs[taken][i]);
      ptx::count_one(&shared.loaded[taken]);
      continue;
    }
    if (is_ping_pong(kBlockN) && taken % 2 != warp / kWarpgroup) continue;
    ptx::wait_count(&shared.loaded[taken], 1);
    for (int slab = 0; slab < kRowSlabs<kBlockN>; ++slab) {
      const int strip = strip_of<kRowSlabs<kBlockN>>(slab, warp);
      const auto& lhs = shared.lhs[taken];
      if (tile.common == Common::tile)
        store_strip<kBlockN / 2>(lhs, source.rhs, epilogue, problem, tile, shared.out[warp], strip);
      else
        store_strip<kBlockN>(lhs, source.rhs, epilogue, problem, tile, shared.out[warp], strip);
    }
    hooks.after_tile(tile, warp);
  }
  if (warp < kConsumerWarps) hooks.after_last(tile, taken, warp);
}

inline Part this_cta() { return {blockIdx.x, gridDim.x}; }

}  // namespace jax_ep::gemm
