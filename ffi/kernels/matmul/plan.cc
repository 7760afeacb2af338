#include "kernels/matmul/plan.h"

#include <algorithm>

namespace jax_ep {

ProductShape shape_of(const GatherMatmulArgs& args, int ranks) {
  return {kind_of(args), args.m * ranks, args.n, args.k, size_of(args.operand_dtype), ranks};
}

ProductShape shape_of(const MatmulReduceArgs& args, int ranks) {
  return {kind_of(args), args.m, args.n, args.k, size_of(args.dtype), ranks};
}

OverlapConfig plan(const ProductShape& shape, const HardwareModel& model) {
  return shape.op == OpKind::all_gather_matmul ? plans::gather(shape, model) : plans::reduce(shape, model);
}

OverlapConfig plan_with(const ProductShape& shape, const HardwareModel& model, int block_n, int communicating) {
  return shape.op == OpKind::all_gather_matmul ? plans::gather_with(shape, model, block_n, communicating)
                                               : plans::reduce_with(shape, model, block_n, communicating);
}

int OverlapConfig::blocks() const { return std::max(communicating, multiplying); }

std::string OverlapConfig::describe() const {
  return "tiles 128x" + std::to_string(block_n) + ", band " + std::to_string(band) + ", " +
         std::to_string(communicating) + " + " + std::to_string(multiplying) +
         (split_k ? " blocks, two a tile, expected " : " blocks, expected ") +
         std::to_string(static_cast<int>(microseconds)) + " us";
}

int plans::pushing_blocks(int blocks_times_peers, int ranks, int most) {
  return std::max(std::min(blocks_times_peers / std::max(ranks - 1, 1), most) / 2 * 2, 2);
}

}  // namespace jax_ep
