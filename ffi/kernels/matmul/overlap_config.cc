#include "kernels/matmul/overlap_config.h"

#include <algorithm>

namespace jax_ep {

int OverlapConfig::blocks() const { return std::max(communicating, multiplying); }

std::string OverlapConfig::describe() const {
  return "tiles 128x" + std::to_string(block_n) + ", band " + std::to_string(band) + ", " +
         std::to_string(communicating) + " + " + std::to_string(multiplying) +
         (split_k ? " blocks, two a tile, expected " : " blocks, expected ") +
         std::to_string(static_cast<int>(microseconds)) + " us";
}

int pushing_blocks(int blocks_times_peers, int ranks, int most) {
  return std::max(std::min(blocks_times_peers / std::max(ranks - 1, 1), most) / 2 * 2, 2);
}

}  // namespace jax_ep
