// The kernels in coops of 64 lanes, as AMD GPUs run them, on the CPU: waves/comm/platform/cpu.h. Products are not among
// them: those with a collective are XLA's there.
#include "drops.h"
#include "moe.h"
#include "sparse.h"

namespace jax_ep {
namespace {

void round_trips(int tokens, int times) {
  const std::shared_ptr<Group> group = make_group(60.0, /*poison=*/true);
  std::vector<Rank> ranks(kRanks, Rank{tokens});
  std::mt19937 random(1);
  for (int i = 0; i < times; ++i) round_trip(*group, ranks, static_cast<Way>(i % kWays), random);
  expect(!group->take_error(), "no error is reported");
}

TEST_CASE("dispatch, combine: few tokens") { round_trips(40, 2 * kWays); }
TEST_CASE("dispatch, combine: many tokens") { round_trips(kMaxTokens, kWays); }
TEST_CASE("dispatch: dropped rows are shared out fairly") {
  drops(40, {Way::straight, Way::float8, Way::few, Way::few_float8});
  drops(kMaxTokens, {Way::straight, Way::float8});
}
TEST_CASE("combine: a row out of bounds") { rows_out_of_bounds(2); }
TEST_CASE("errors: ranks at different ops are named") {
  for (const bool other_op : {false, true}) different_ops(other_op);
}
TEST_CASE("lost rank: dispatch") {
  for (int way = 0; way < kWays; ++way) lost_rank(40, static_cast<Way>(way));
}
TEST_CASE("lost rank: sparse_reduce") { lost_sparse_rank(); }
TEST_CASE("sparse: rows are the sums of all ranks") { sparse_reductions(8); }

}  // namespace
}  // namespace jax_ep
