#include "kernels/plan.h"

#include <algorithm>

#include "kernels/moe/args.h"
#include "kernels/moe/dot_combine_args.h"

namespace jax_ep {
namespace {

int even(int blocks) { return std::max(blocks / gemm::kCluster, 1) * gemm::kCluster; }

// How many tile pairs a pair of blocks multiplies while others still dispatch: as long as whole tiles are here.
int head_of(const DotShape& shape, const HardwareModel& model, int block_n, int dispatching) {
  const double bytes = double{1} * shape.num_tokens * shape.top_k * shape.row_bytes;
  const double early_us = model.dot.early * bytes / (dispatching * model.dot.bytes_per_us);
  const double tile_us = 2.0 * gemm::kBlockM * block_n * shape.product.k / model.gather.flops_per_us;
  return static_cast<int>(early_us / tile_us);
}

}  // namespace

DotShape shape_of(const DispatchDotArgs& args, int ranks) {
  const gemm::Problem product = product_of(args, ranks, /*band=*/1);
  return {{product.grouping, product.m, product.n, product.k, product.groups},
          ranks,
          args.num_tokens,
          args.top_k,
          args.hidden * size_of(args.dtype)};
}

DotConfig plan(const DotShape& shape, const HardwareModel& model) {
  HardwareModel whole = model, few = model;
  whole.sms = model.device_sms;  // what an op may take must not change the sums
  few.row_sms = std::min(model.dot.dispatching, model.sms / 4);
  DotConfig config{gemm::plan_fixed(shape.product, whole), 0, 0, 0};
  const LaunchConfig dispatch = plan(RowShape{OpKind::dispatch, shape.ranks, shape.num_tokens, false}, few);
  config.dispatching = even(dispatch.blocks);
  config.senders_per_cta = dispatch.senders_per_cta;
  config.product.blocks = std::max(std::min(config.product.blocks, even(model.sms)), config.dispatching);
  if (config.product.blocks > config.dispatching)
    config.head = head_of(shape, model, config.product.block_n, config.dispatching);
  return config;
}

std::string DotConfig::describe() const {
  return product.describe() + ", of which " + std::to_string(dispatching) + " dispatch first with " +
         std::to_string(senders_per_cta) + " sender warps in each, for the time of " + std::to_string(head) +
         " tile pairs";
}

}  // namespace jax_ep
