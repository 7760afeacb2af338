// The launch of every op where a block has only four teams, as on AMD: all of them can be there.
#include "runtime/gpu/launch_config.h"

#include <cstdio>
#include <cstdlib>
#include <initializer_list>

#include "comm/platform.h"
#include "runtime.h"

namespace jax_ep {
namespace {

void expect(bool condition, const char* what, OpKind op, int tokens, int blocks) {
  if (condition) return;
  std::fprintf(stderr, "FAILED: %s (op %d, %d tokens, %d blocks)\n", what, static_cast<int>(op), tokens, blocks);
  std::exit(1);
}

void check(OpKind op, int ranks, int tokens, bool encoded, Budget budget) {
  const LaunchConfig config = launch_config(op, ranks, tokens, encoded, budget);
  const int teams = config.threads / gpu::kTeamLanes;
  int pushing = 0;
  for (int team = 0; team < teams; ++team)
    pushing += pusher_place(0, config.blocks, team, config.pushers_per_block).index >= 0;
  const int counted = pusher_place(0, config.blocks, 0, config.pushers_per_block).count;
  expect(config.blocks >= 1 && config.blocks <= budget.blocks, "blocks are within the budget", op, tokens,
         budget.blocks);
  expect(counted == pushing * config.blocks, "every pusher that is counted exists", op, tokens, budget.blocks);
  expect(config.team_bytes * teams <= budget.shared_bytes && config.team_bytes * (teams + 1) > budget.shared_bytes,
         "the teams share all of the shared memory", op, tokens, budget.blocks);
}

}  // namespace
}  // namespace jax_ep

int main() {
  using namespace jax_ep;
  constexpr OpKind kLaunched[] = {OpKind::dispatch,          OpKind::scatter,      OpKind::combine,
                                  OpKind::ragged_all_to_all, OpKind::sparse_union, OpKind::sparse_reduce};
  for (const OpKind op : kLaunched)
    for (const int tokens : {0, 1, 128, 512, 513, 4096})
      for (const bool encoded : {false, true})
        for (const int blocks : {1, 8, 31, 32, 64, 96, 222})
          for (const int ranks : {2, 4}) check(op, ranks, tokens, encoded, {blocks, 1 << 16});
  std::puts("launches: all checks passed");
  return 0;
}
