#include "kernels/plan.h"

#include <algorithm>

#include "comm/heap.h"
#include "comm/layout.h"

namespace jax_ep {
namespace {

constexpr int kThreads = 256;
// Shared memory of a team: barriers, then a row of 7168 values in float8 to write and three halves of one in 16 bits to
// read, or four such halves, or seven batches of 4 KiB, or a ring of three pieces of a row.
constexpr int kTeamBytes = kBarrierBytes + 7424 + 3 * 7168;
static_assert(RowRates{}.union_blocks * kMaxSquadTeams <= kMaxTeams,
              "the scratch of sparse_union has room for no more");

int find_pushers(const PusherRule (&rules)[kPusherRules], int ranks, int blocks) {
  const auto* const rule =
      std::find_if(rules, std::end(rules), [&](const PusherRule& each) { return blocks <= each.most_blocks; });
  return ranks > 2 ? rule->more_ranks : rule->two_ranks;  // two ranks send each other less
}

// How many teams of a block push.
int pushers(const RowShape& shape, const RowRates& rates, int blocks, int teams) {
  const bool few = shape.num_tokens <= kFewTokens;
  switch (shape.op) {
    case OpKind::dispatch:
    case OpKind::scatter:
      if (shape.encoded && few) return rates.few_pushers;
      return find_pushers(shape.encoded ? rates.dispatch_float8 : rates.dispatch, shape.ranks, blocks);
    case OpKind::combine:
      return few ? rates.few_pushers : find_pushers(rates.combine, shape.ranks, blocks);
    default:
      return teams;
  }
}

// The blocks that an op has work for, where that is known. Even few tokens have many rows where they arrive.
int useful_blocks(const RowShape& shape, const RowRates& rates, int all) {
  switch (shape.op) {
    case OpKind::dispatch:
    case OpKind::combine:
    case OpKind::ragged_all_to_all:
      return all;
    case OpKind::sparse_union:
      return std::min(shape.num_tokens / rates.union_entries_per_block + 1, rates.union_blocks);
    default:
      return shape.num_tokens;
  }
}

}  // namespace

LaunchConfig plan(const RowShape& shape, const HardwareModel& model) {
  const int most = std::max(1, model.row_sms), teams = kThreads / model.team_lanes;
  const int blocks = std::clamp(useful_blocks(shape, model.rows, model.row_sms), 1, most);
  const int team_bytes = std::min(kTeamBytes, model.shared_bytes / teams / 128 * 128);
  return {blocks, kThreads, std::min(pushers(shape, model.rows, blocks, teams), teams), team_bytes};
}

std::string LaunchConfig::describe() const {
  return std::to_string(blocks) + " blocks of " + std::to_string(threads) + " threads, " +
         std::to_string(pushers_per_block) + " warps of each push, " + std::to_string(team_bytes) + " bytes a warp";
}

}  // namespace jax_ep
