// One kernel on Hopper for a product and its combine. All CTAs multiply; the warps that do so combine afterwards, in
// the shared memory of the stages. The first CTAs multiply less. Whoever multiplies waits for nobody, but once, before
// it counts its first tile, for the first CTA to have cleared the words.
#pragma once

#include "comm/target/ptx/bulk.h"
#include "comm/target/ptx/cta.h"
#include "gemm/kernel.h"
#include "gemm/row_of.h"
#include "kernels/moe/dot_combine.h"
#include "kernels/role.h"

namespace jax_ep {

// What the kernel is told of its op.
struct DotCombineWork {
  Comm comm;
  DotCombineArgs args;
  int leaving, body;  // as in DotCombineConfig

  JAX_EP_FN gemm::Share share() const {
    return {static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x), 0, 0, leaving, body};
  }
};

// The warps that multiply, and then combine; and the one that loads: before it does, that of the first CTA clears the
// words, and all note that they have begun.
JAX_EP_FN Role combiners() { return {0, gemm::kConsumerWarps, 0, static_cast<int>(gridDim.x), kCommunicators}; }
JAX_EP_FN Role beginners() { return one_warp_a_cta(gemm::kConsumerWarps); }

// Tiles are narrow, so warpgroups take turns: while one waits until its tile is written, and counts it, the other
// multiplies.
constexpr int kDotCombineColumns = 128;

template <class In>
class DotCombineHooks {
 public:
  static constexpr bool kStores = false, kAwaitStores = true;
  using Aux = gemm::Nothing;

  JAX_EP_FN DotCombineHooks(Op& op, const DotCombineArgs& args) : op_(op), args_(args) {}

  JAX_EP_FN gemm::Rows before_tile(const gemm::Tile& tile, const CUtensorMap& lhs) const { return {lhs, tile.row}; }
  JAX_EP_FN void after_tile(const gemm::Tile& tile, int warp) const {
    if (!asked_) clear_ = await_words(op_);
    asked_ = true;
    if (!clear_ || op_.coop.lane != 0 || tile.col >= args_.hidden) return;
    ptx::proxy_fence();
    const ReadyRows ready(op_, args_.words, args_.capacity);
    for (int part = 0; part < gemm::kParts<kDotCombineColumns>; ++part) {
      const int row = tile.row + gemm::strip_of<kDotCombineColumns>(part, warp) * gemm::kOutRows;
      ready.count({row, smaller(row + gemm::kOutRows, tile.row_end)}, tile.out_end - tile.out_col,
                  align_up(args_.hidden, kDotCombineColumns));
    }
  }
  // Combines inside the branch of those that multiply: only there a thread has 224 registers.
  JAX_EP_FN void after_last(const gemm::Tile&, int, int) const {
    ptx::proxy_fence();                   // before bulk copies overwrite what was left there
    ptx::sync_some(1, gemm::kConsumers);  // all that multiply have written their tiles
    combine_product<typename RowOf<In>::Type>(op_, args_, gridDim.x);
    op_.finish(Results<DotCombineArgs>(args_, op_.comm.size), combiners().coops());
  }

 private:
  Op& op_;
  const DotCombineArgs& args_;
  mutable bool asked_ = false, clear_ = false;  // the words
};

// Debug: all warps of all CTAs fill the results before any is written to.
JAX_EP_FN void poison_results(const DotCombineWork& work) {
  if (!work.comm.poison) return;
  const Coop coop = whole_ctas(0, static_cast<int>(gridDim.x)).coop();
  Op(work.comm, coop, kind_of(work.args)).poison(Results<DotCombineArgs>(work.args, work.comm.size));
  ptx::proxy_fence();  // before bulk copies write there
}

JAX_EP_FN void begin_product(const DotCombineWork& work) {
  const Coop coop = beginners().coop();
  Op op(work.comm, coop, kind_of(work.args));
  begin_product(op, work.args);
}

template <class In>
__global__ void __cluster_dims__(gemm::kCluster, 1, 1) __launch_bounds__(gemm::kThreads, 1)
    dot_combine_kernel(const __grid_constant__ CUtensorMap lhs, const __grid_constant__ CUtensorMap rhs,
                       const __grid_constant__ CUtensorMap product, const __grid_constant__ gemm::Problem problem,
                       const __grid_constant__ DotCombineWork work) {
  extern __shared__ __align__(1024) char memory[];
  poison_results(work);
  if (beginners().is_mine()) begin_product(work);
  // The barriers of the pipeline stay: the peer's consumers may still arrive there.
  const char* const end =
      reinterpret_cast<const char*>(reinterpret_cast<gemm::Shared<kDotCombineColumns>*>(memory)->full);
  const int bytes = static_cast<int>(end - memory) / gemm::kConsumerWarps / 128 * 128;
  const Coop coop = combiners().coop(/*is_tracked=*/true, memory, bytes);
  Op op(work.comm, coop, kind_of(work.args));
  const DotCombineHooks<In> hooks(op, work.args);
  gemm::multiply_tiles<In, In, kDotCombineColumns, false, true>(memory, lhs, rhs, product, work.args.product, problem,
                                                                hooks, work.share());
}

}  // namespace jax_ep
