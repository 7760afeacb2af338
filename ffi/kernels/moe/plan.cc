#include "kernels/plan.h"

#include <algorithm>
#include <cmath>
#include <optional>

#include "kernels/moe/args.h"
#include "kernels/moe/dot_args.h"

namespace jax_ep {
namespace {

int even(int blocks) { return std::max(blocks / gemm::kCluster, 1) * gemm::kCluster; }

double tile_us(const gemm::Shape& product, const HardwareModel& model, int block_n) {
  return 2.0 * gemm::kBlockM * block_n * product.k / model.gather.flops_per_us;
}

// How many tile pairs a pair of blocks multiplies while others still dispatch: as long as whole tiles are here.
int head_of(const DotShape& shape, const HardwareModel& model, int block_n, int dispatching) {
  const double bytes = double{1} * shape.num_tokens * shape.top_k * shape.row_bytes;
  const double early_us = model.dot.early * bytes / (dispatching * model.dot.bytes_per_us);
  return static_cast<int>(early_us / tile_us(shape.product, model, block_n));
}

// How many tile pairs a pair of blocks multiplies before it combines, if `leaving` blocks do so early: such that all
// end as soon as they can, where each expert has as many rows as another. None where it is best that nobody does.
std::optional<int> body_of(const DotCombineShape& shape, const HardwareModel& model, const gemm::Config& product,
                           int leaving) {
  const double kept = std::pow(1.0 - 1.0 / shape.ranks, shape.top_k);  // of a rank's tokens, that another has none of
  const double bytes = (shape.ranks - 1) * (1 - kept) * shape.num_tokens * shape.row_bytes;
  const double rows = std::min(1.0 * shape.product.m, 1.0 * shape.num_tokens * shape.top_k);
  const double tiles = (rows / gemm::kBlockM + shape.product.groups / 2.0) *
                       ceil_div(shape.product.n, product.block_n) * (product.split_k ? 2 : 1);
  const double one_us = tile_us(shape.product, model, product.block_n) / (product.split_k ? 2 : 1);
  const auto sending_us = [&](int blocks) { return bytes / (blocks * model.dot.bytes_per_us); };
  const double turns = std::ceil(tiles / product.blocks);
  double best_us = turns * one_us + sending_us(product.blocks);
  std::optional<int> best;
  for (int body = 0; body < turns; ++body) {
    const double others_us = std::ceil((tiles - leaving * body) / (product.blocks - leaving)) * one_us;
    const double us = std::max(others_us, body * one_us + sending_us(leaving));
    if (us < best_us) best_us = us, best = body;
  }
  return best;
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

DotCombineShape shape_of(const DotCombineArgs& args, int ranks) {
  const gemm::Problem product = product_of(args, ranks, /*band=*/1);
  return {{{product.grouping, product.m, product.n, product.k, product.groups},
           ranks,
           args.num_tokens,
           args.top_k,
           args.hidden * size_of(args.dtype)}};
}

DotCombineConfig plan(const DotCombineShape& shape, const HardwareModel& model) {
  HardwareModel whole = model;
  whole.sms = model.device_sms;  // what an op may take must not change the sums
  const gemm::Config split = gemm::plan_fixed(shape.product, whole);
  DotCombineConfig config{split.split_k ? split : gemm::plan_width(shape.product, whole, 128), 0, 0};
  int& blocks = config.product.blocks;
  blocks = std::max(std::min(blocks, even(model.sms)), gemm::kCluster);
  const int leaving = std::min(model.dot.leaving, blocks / 4) / gemm::kCluster * gemm::kCluster;
  if (shape.ranks == 1 || leaving == 0) return config;  // nothing is sent
  if (const std::optional<int> body = body_of(shape, model, config.product, leaving)) {
    config.leaving = leaving;
    config.body = *body;
  }
  return config;
}

std::string DotCombineConfig::describe() const {
  if (leaving == 0) return product.describe() + ", which then combine";
  return product.describe() + ", of which " + std::to_string(leaving) + " combine after " + std::to_string(body) +
         " tile pairs";
}

std::string DotConfig::describe() const {
  return product.describe() + ", of which " + std::to_string(dispatching) + " dispatch first with " +
         std::to_string(senders_per_cta) + " sender warps in each, for the time of " + std::to_string(head) +
         " tile pairs";
}

}  // namespace jax_ep
