// Gathered operands: row i of the operand is row indices[i] of another matrix.
//
// TMA cannot gather on Hopper. Two warps copy the rows by cp.async, 16 bytes a lane, into the swizzle that wgmma reads.
// Each of them fills one slice of every stage. A third warp waits for the copies, makes them visible to wgmma and
// announces the stage. The CTAs of a cluster share only the other operand by multicast.
//
// Rows past the end of a group are rows of the next group, as with TMA. Their products are not stored. If the
// contraction is gathered, the consumers zero these rows (multiply.h).
#pragma once

#include <concepts>

#include "comm/platform/ptx/bulk.h"
#include "gemm/grouped_matmul.h"
#include "gemm/layout.h"
#include "gemm/pipeline.h"
#include "gemm/ptx/copies.h"
#include "gemm/ptx/warps.h"
#include "gemm/schedule.h"

namespace jax_ep::gemm {

constexpr int kGatherWarps = 2;
constexpr int kSwizzleVecs = kSwizzleBytes / 16;
constexpr int kRowsAtOnce = 32 / kSwizzleVecs;   // of a warp
constexpr int kLaneRows = kSlice / kRowsAtOnce;  // of a slice: a lane copies 16 bytes of each
constexpr uint32_t kZeroIndex = ~0u;             // the index of a row of zeros
constexpr uint32_t kNoRow = ~0u;                 // the entry of a row that is not copied

struct Gathering {
  const char* matrix;
  int rows, columns;  // columns of 16 bits: two values of float8 are one
  const int32_t* indices;
  int count;  // of indices

  JAX_EP_FN explicit Gathering(const GroupedMatmul& x)
      : matrix(static_cast<const char*>(x.lhs)),
        rows(x.source_rows),
        columns(x.grouping == Grouping::m_grouped ? x.k / (x.is_float8() ? 2 : 1) : x.m),
        indices(x.indices),
        count(x.grouping == Grouping::m_grouped ? x.m : x.k) {}

  JAX_EP_FN bool is_nan(uint32_t index) const { return index + 1 > static_cast<uint32_t>(rows); }
};

// The shared memory of a CTA whose aux warps gather.
template <class Base>
struct GatheredMemory : Base {
  static constexpr int kStages = Base::kStages;

  uint64_t landed[kStages];  // the copies of a stage
  // If the contraction is gathered:
  uint64_t found[kStages];          // the rows of a stage are known
  uint4 rows[kStages][kSlice / 4];  // where they begin; the 16 entries of a lane are contiguous
  uint32_t has_nans[kStages];
};

// Where the 64 rows of a slice begin in the matrix. Each lane has two.
struct FoundRows {
  uint32_t rows[2];  // rows lane and lane + 32: in vectors from the start of the matrix, or kNoRow
  bool has_nans;     // whether any row of the slice is NaN

  // Starts to load the indices from indices[first] on. find() waits for them.
  JAX_EP_FN void read(const Gathering& from, int first, int lane) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = first + i * 32 + lane;
      rows[i] = at < from.count ? load_here(from.indices + at) : kZeroIndex;
    }
  }
  JAX_EP_FN void find(const Gathering& from) {
    has_nans = __any_sync(~0u, from.is_nan(rows[0]) || from.is_nan(rows[1]));
#pragma unroll
    for (uint32_t& row : rows) row = row < static_cast<uint32_t>(from.rows) ? row * (from.columns / 8) : kNoRow;
  }

  // Passes the rows of `stage` to the gathering warps, through shared memory.
  template <class Memory>
  JAX_EP_FN void put(Memory& shared, int stage, int lane) const {
    uint32_t* const to = reinterpret_cast<uint32_t*>(shared.rows[stage]);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = i * 32 + lane;
      to[row % kRowsAtOnce * kLaneRows + row / kRowsAtOnce] = rows[i];
    }
    if (lane == 0) shared.has_nans[stage] = has_nans;
    __syncwarp();
    if (lane == 0) ptx::arrive(&shared.found[stage]);
  }
};

// A lane copies 16 bytes of these rows: row lane / 8 of a slice and every fourth row after it.
struct LaneRows {
  uint32_t rows[kLaneRows];
  bool has_nans;

  JAX_EP_FN void take(const FoundRows& found, int lane) {
    has_nans = found.has_nans;
#pragma unroll
    for (int j = 0; j < kLaneRows; ++j)
      rows[j] = __shfl_sync(~0u, found.rows[j * kRowsAtOnce / 32], lane / kSwizzleVecs + j * kRowsAtOnce % 32);
  }
  template <class Memory>
  JAX_EP_FN void take(const Memory& shared, int stage, int lane) {
    has_nans = shared.has_nans[stage];
#pragma unroll
    for (int i = 0; i < kLaneRows; i += 4) {
      const uint4 four = shared.rows[stage][(lane / kSwizzleVecs * kLaneRows + i) / 4];
      rows[i] = four.x, rows[i + 1] = four.y, rows[i + 2] = four.z, rows[i + 3] = four.w;
    }
  }

  // Copies 64 columns from `column` on of the first `count` rows, rounded up to 16. Columns past the last become zeros.
  // Row i is row indices[first + i] of the matrix.
  JAX_EP_FN void copy(char* to, const Gathering& from, int first, int count, int column, int lane) const {
    const int vec = lane % kSwizzleVecs, at = column + vec * 8;
    const char* const columns = from.matrix + int64_t{at} * 2;
    const bool outside = at >= from.columns;
    const uint32_t even = ptx::shared_address(to + swizzled(lane / kSwizzleVecs, vec)),
                   odd = ptx::shared_address(to + swizzled(lane / kSwizzleVecs + kRowsAtOnce, vec));
    copy_rows<0>(even, odd, columns, outside);
    if (count > 16) copy_rows<4>(even, odd, columns, outside);
    if (count > 32) copy_rows<8>(even, odd, columns, outside);
    if (count > 48) copy_rows<12>(even, odd, columns, outside);
    if (has_nans) put_nans(to, from, first, count, lane);
  }

 private:
  template <int kFirst>
  JAX_EP_FN void copy_rows(uint32_t even, uint32_t odd, const char* columns, bool outside) const {
    constexpr int kTwo = 2 * kRowsAtOnce * kSwizzleBytes, kOffset = kFirst / 2 * kTwo;
    copy_vector<kOffset>(even, columns, rows[kFirst], outside || rows[kFirst] == kNoRow);
    copy_vector<kOffset>(odd, columns, rows[kFirst + 1], outside || rows[kFirst + 1] == kNoRow);
    copy_vector<kOffset + kTwo>(even, columns, rows[kFirst + 2], outside || rows[kFirst + 2] == kNoRow);
    copy_vector<kOffset + kTwo>(odd, columns, rows[kFirst + 3], outside || rows[kFirst + 3] == kNoRow);
  }
  // Waits for the copies, which wrote zeros into rows of NaN, and overwrites the zeros.
  JAX_EP_FN static void put_nans(char* to, const Gathering& from, int first, int count, int lane) {
    wait_copies();
#pragma unroll 1
    for (int row = lane / kSwizzleVecs; row < count && first + row < from.count; row += kRowsAtOnce)
      if (from.is_nan(from.indices[first + row]))
        *reinterpret_cast<uint4*>(to + swizzled(row, lane % kSwizzleVecs)) = make_uint4(~0u, ~0u, ~0u, ~0u);
    __threadfence_block();
  }
};

// A gathering warp: fills its slice of all stages.
template <class Loop, bool kContraction, class Memory>
__device__ void gather(Memory& shared, const typename Loop::Source& source, const Problem& problem, Part cta,
                       int warp) {
  using Source = typename Loop::Source;
  const int lane = threadIdx.x % 32;
  const Gathering from(source.product);
  PipelineState<Memory::kStages> at;
  auto tiles = Loop::Tiles::list(shared, problem, cta);
  for (typename Loop::Tile tile; tiles.next(&tile);) {
    const int first = tile.row + warp * kSlice, count = Source::rows_of(tile) - warp * kSlice;
    LaneRows rows;
    if constexpr (!kContraction) {
      FoundRows found;
      found.read(from, first, lane);
      found.find(from);
      rows.take(found, lane);
    }
    for (int k = tile.k_begin; k < tile.k_end; k += kBlockK, at.advance()) {
      if constexpr (kContraction) {
        wait_barrier(&shared.found[at.stage], at.parity, "the rows to gather");
        rows.take(shared, at.stage, lane);
      }
      wait_barrier(&shared.empty[at.stage], at.parity ^ 1, "an empty stage to gather into");
      char* const to = shared.stages[at.stage] + (Source::kGatheredSlice + warp) * kSliceBytes;
      if (count > 0) {
        if constexpr (kContraction)
          rows.copy(to, from, k, kSlice, first, lane);
        else
          rows.copy(to, from, first, smaller(count, kSlice), k, lane);
      }
      arrive_when_copied(&shared.landed[at.stage]);
    }
  }
  producer_tail(shared, at);
}

template <class Memory>
JAX_EP_FN void announce_stage(Memory& shared, const PipelineState<Memory::kStages>& at, int lane) {
  wait_barrier(&shared.landed[at.stage], at.parity, "gathered rows");
  ptx::shared_proxy_fence();
  if (lane == 0) ptx::arrive(&shared.full[at.stage]);
}

// The announcing warp if rows are gathered. In the cluster's first CTA it also draws tiles from the queue.
template <class Loop, class Memory>
__device__ void announce_rows(Memory& shared, const typename Loop::Source& source, const Problem& problem, Part cta) {
  const int cta_in_cluster = blockIdx.x % kCluster, lane = threadIdx.x % 32;
  PipelineState<Memory::kStages> at;
  auto feeder = Loop::Tiles::feeder(shared, source, problem);
  if (cta_in_cluster == 0) feeder.feed();
  auto tiles = Loop::Tiles::list(shared, problem, cta);
  for (typename Loop::Tile tile; tiles.next(&tile);) {
    if (cta_in_cluster == 0) feeder.feed();
    for (int k = tile.k_begin; k < tile.k_end; k += kBlockK, at.advance()) announce_stage(shared, at, lane);
  }
}

template <class Tiles>
class ContractionSteps {
 public:
  JAX_EP_FN explicit ContractionSteps(const Tiles& tiles) : tiles_(tiles) { tile_.k_end = k_ = 0; }

  // Where the next step begins in the contraction, or -1 after the last.
  JAX_EP_FN int next() {
    for (; k_ >= tile_.k_end; k_ = tile_.k_begin)
      if (!tiles_.next(&tile_)) return -1;
    k_ += kBlockK;
    return k_ - kBlockK;
  }

 private:
  Tiles tiles_;
  Tile tile_;
  int k_;
};

// The announcing warp if the contraction is gathered. It also finds the rows, kStages steps ahead. If a gathering warp
// loaded indices, it would also wait for its earlier copies.
template <class Loop, class Memory>
__device__ void announce_contraction(Memory& shared, const typename Loop::Source& source, const Problem& problem,
                                     Part cta) {
  const int lane = threadIdx.x % 32;
  const Gathering from(source.product);
  ContractionSteps steps(Loop::Tiles::list(shared, problem, cta));
  int ahead = 0;  // steps whose rows are found and not announced
  for (FoundRows found; ahead < Memory::kStages; ++ahead) {
    const int k = steps.next();
    if (k < 0) break;
    found.read(from, k, lane);
    found.find(from);
    found.put(shared, ahead, lane);
  }
  for (PipelineState<Memory::kStages> at; ahead > 0; at.advance()) {
    const int k = steps.next();
    FoundRows found;
    if (k >= 0) found.read(from, k, lane);
    announce_stage(shared, at, lane);
    if (k < 0) {
      --ahead;
    } else {  // the stage has landed, so gathering warps have read its rows
      found.find(from);
      found.put(shared, at.stage, lane);
    }
  }
}

// A source that says what the aux warps gather:
//   kGatheredSlice   the first slice of a stage that the gathering warps fill
//   product          where the gathered matrix and its indices are
//   rows_of(tile)    how many rows of a tile there are to gather
template <class Source, class Tile>
concept GathersRows = requires(const Source& source, const Tile& tile) {
  { Source::kGatheredSlice } -> std::same_as<const int&>;
  { source.product } -> std::same_as<const GroupedMatmul&>;
  { Source::rows_of(tile) } -> std::same_as<int>;
};

// The role of the aux warps (kernel.h) that gather an operand: rows of the contraction, or rows of tiles.
template <bool kContraction>
struct Gather {
  template <class Base>
  using Memory = GatheredMemory<Base>;
  static constexpr bool kFills = true;
  static constexpr int kQueueReaders = kAuxWarps, kRegisters = 40;

  template <class Base>
  JAX_EP_FN static void open(GatheredMemory<Base>& shared) {
    for (int stage = 0; stage < shared.kStages; ++stage) {
      ptx::init_barrier(&shared.landed[stage], kGatherWarps * 32);
      ptx::init_barrier(&shared.found[stage], 1);
    }
  }
  template <class Loop>
  JAX_EP_FN static void run(auto& shared, const auto& source, const Problem& problem, Part cta, int aux_warp) {
    static_assert(GathersRows<typename Loop::Source, typename Loop::Tile>);
    if (aux_warp < kGatherWarps)
      gather<Loop, kContraction>(shared, source, problem, cta, aux_warp);
    else if constexpr (kContraction)
      announce_contraction<Loop>(shared, source, problem, cta);
    else
      announce_rows<Loop>(shared, source, problem, cta);
  }
};

}  // namespace jax_ep::gemm
