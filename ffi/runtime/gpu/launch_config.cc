#include "runtime/gpu/launch_config.h"

#include <algorithm>

#include "comm/layout.h"
#include "runtime.h"  // of the GPU platform this library is built for

namespace jax_ep {
namespace {

constexpr int kThreads = 256, kTeams = kThreads / gpu::kTeamLanes;
// Shared memory of a team: barriers, then a row of 7168 values in float8 to write and three halves of one in 16 bits to
// read, or four such halves, or seven batches of 4 KiB, or a ring of three pieces of a row.
constexpr int kTeamBytes = kBarrierBytes + 7424 + 3 * 7168;
constexpr int kEntriesPerBlock = 256;
constexpr int kUnionBlocks = 96;
static_assert(kUnionBlocks * kTeams <= kMaxTeams, "the scratch of sparse_union has room for no more");

// Of the teams of a block, if it has so many; measured on 2 and 4 H200 by benchmarks/kernels.
int pushers(OpKind op, int ranks, bool encoded, int num_tokens, int blocks) {
  const bool few = num_tokens <= kFewTokens;
  switch (op) {
    case OpKind::dispatch:
    case OpKind::scatter:
      if (encoded && few) return 4;
      if (encoded) return blocks <= 32 ? 5 : ranks > 2 ? 2 : blocks <= 64 ? 4 : 3;  // two ranks send each other less
      return blocks < 32 ? 3 : 2;
    case OpKind::combine:
      if (few) return 4;
      if (blocks <= 32) return ranks > 2 ? 6 : 7;
      return blocks < 64 ? 6 : blocks < 96 ? 5 : 3;
    default:
      return kTeams;
  }
}

// The blocks that an op has work for, where that is known. Even few tokens have many rows where they arrive.
int useful_blocks(OpKind op, int num_tokens, int all) {
  if (op == OpKind::ragged_all_to_all || op == OpKind::dispatch || op == OpKind::combine) return all;
  return op == OpKind::sparse_union ? std::min(num_tokens / kEntriesPerBlock + 1, kUnionBlocks) : num_tokens;
}

}  // namespace

int default_blocks(int processors) { return std::max(1, processors * 73 / 100); }

LaunchConfig launch_config(OpKind op, int ranks, int num_tokens, bool encoded, Budget budget) {
  const int blocks = std::clamp(useful_blocks(op, num_tokens, budget.blocks), 1, std::max(1, budget.blocks));
  const int team_bytes = std::min(kTeamBytes, budget.shared_bytes / kTeams / 128 * 128);
  return {blocks, kThreads, std::min(pushers(op, ranks, encoded, num_tokens, blocks), kTeams), team_bytes};
}

}  // namespace jax_ep
