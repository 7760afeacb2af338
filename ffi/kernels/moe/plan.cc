#include "kernels/plan.h"

#include <algorithm>
#include <cmath>

#include "gemm/row_schedule.h"
#include "kernels/moe/args.h"
#include "kernels/moe/dot_args.h"

namespace jax_ep {
namespace {

int even(int blocks) { return std::max(blocks / gemm::kCluster, 1) * gemm::kCluster; }

// On few SMs as many warps send as take in: a choice, others of which were no faster (bench layer --kernel).
int half_of_warps(const LaunchConfig& config, const HardwareModel& model) {
  return std::max(1, config.threads / model.warp_lanes / 2);
}

// Rows in groups, if no rank has more than another.
double rows_of(const DotShape& shape) { return std::min(1.0 * shape.product.m, 1.0 * shape.num_tokens * shape.top_k); }

// The part of a product in which `leaving` blocks send, while the others multiply: as long as it takes to send what
// they sum up, but not while few tokens have all of their rows.
double sending_part(const DotCombineShape& shape, const HardwareModel& model, int leaving) {
  const double kept = std::pow(1.0 - 1.0 / shape.ranks, shape.top_k);  // of a rank's tokens, that another has none of
  const double sums = (shape.ranks - 1) * (1 - kept) * shape.num_tokens;
  const double rows = (shape.ranks - 1.0) / shape.ranks * shape.num_tokens * shape.top_k;  // that are summed up
  const double sending_us = (sums + rows) * shape.row_bytes / (leaving * model.dot.summed_per_us);
  const double flops = 2.0 * rows_of(shape) * shape.product.n * shape.product.k;
  const double multiplying_us = flops / ((model.device_sms - leaving) * model.gather.flops_per_us);
  return std::min(model.dot.most_sending, sending_us / multiplying_us);
}

// Tile pairs, where each expert has as many rows as another.
int tile_pairs(const DotCombineShape& shape) {
  const int rows = ceil_div(static_cast<int>(rows_of(shape)), std::max(shape.product.groups, 1));
  return shape.product.groups * ceil_div(rows, gemm::kMostRows) *
         ceil_div(shape.product.n, gemm::kTileColumns * gemm::kCluster);
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
  whole.sms = model.device_sms;  // a product alone takes all
  few.row_sms = std::max(1, std::min(model.dot.dispatching, model.row_sms));
  DotConfig config{plan(RowShape{OpKind::dispatch, shape.ranks, shape.num_tokens, false}, few),
                   gemm::plan_swapped(shape.product, whole, gemm::kTileColumns)};
  config.dispatch.senders_per_cta = half_of_warps(config.dispatch, model);
  return config;
}

std::string DotConfig::describe() const { return dispatch.describe() + "; behind them " + product.describe(); }

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
  whole.sms = model.device_sms;  // a product alone takes all
  DotCombineConfig config{gemm::plan_swapped(shape.product, whole, gemm::kTileColumns),
                          plan(RowShape{OpKind::combine, shape.ranks, shape.num_tokens, false}, model), 0, 0};
  config.combine.senders_per_cta = half_of_warps(config.combine, model);
  if (shape.ranks == 1 || config.product.blocks <= gemm::kCluster) return config;  // nothing is sent, or nobody left
  config.leaving = even(std::min({model.dot.leaving, config.combine.blocks, config.product.blocks / 2}));
  config.tail = static_cast<int>(sending_part(shape, model, config.leaving) * tile_pairs(shape));
  return config;
}

std::string DotCombineConfig::describe() const {
  return product.describe() + ", of which " + std::to_string(leaving) + " leave when " + std::to_string(tail) +
         " tile pairs are left; behind them " + combine.describe();
}

}  // namespace jax_ep
