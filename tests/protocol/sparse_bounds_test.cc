// sparse_reduce of places and bounds that no union gives, as a program from a file may hand it: with parts that are
// sent ahead to the landing, as on GPUs, or fetched. Nothing is read or written out of bounds: run under
// AddressSanitizer.
#include <climits>

#include "sparse.h"

namespace jax_ep {
namespace {

constexpr int kOdd[] = {INT_MIN, -1, kPlaces, kPlaces + 1, 1 << 30, INT_MAX};

int odd(std::mt19937& random) { return kOdd[random() % std::size(kOdd)]; }

// All ranks have the same ones, as they have from a file.
void spoil(std::vector<SparseRank>& ranks, std::mt19937& random) {
  for (int32_t& place : ranks[0].places)
    if (random() % 3 == 0) place = random() % 2 ? odd(random) : static_cast<int>(random() % kPlaces);
  if (random() % 2)
    for (int32_t& bound : ranks[0].bounds) bound = random() % 2 ? odd(random) : static_cast<int>(random() % kPlaces);
  for (SparseRank& rank : ranks) rank.places = ranks[0].places, rank.bounds = ranks[0].bounds;
}

// More rows than are left below 2^31 after the last stride.
TEST_CASE("a coop's part ends though its stride passes 2^31") {
  Group group({{0}}, 20.0, /*poison=*/false);
  const Coop coop({1, 1 << 30});
  Op op(group.comm({0, 0}), coop, OpKind::sparse_reduce);
  int32_t bounds[2] = {};
  SparseReduceArgs args{};
  args.bounds = bounds;
  std::vector<int> visited;
  SparseRuns(op, args).for_my_part(2147483647, [&](int i) {
    visited.push_back(i);
    expect(visited.size() < 3, "a part ends");
  });
  expect(visited == std::vector<int>({1, 1 + (1 << 30)}), "a part is every `count`-th entry");
  char nothing;
  args.result = &nothing;  // of rows without values
  args.capacity = INT_MAX;
  SparseReduce<float>(op, args).pad();
}

// Whether a rank has no room depends on the bounds, and is told.
TEST_CASE("places and bounds that no union gives stay inside the buffers") {
  Group group({{0, 1, 2, 3}}, 20.0, /*poison=*/true);
  std::mt19937 random(8);
  for (int i = 0; i < 48; ++i) {
    const bool sharded = i % 2, landing_used = i / 2 % 2, drop = i / 4 % 2;
    std::vector<SparseRank> ranks = draw_sparse_ranks(random());
    unite_on_all_ranks(group, ranks, sharded);
    spoil(ranks, random);
    run_on_all_ranks(group, [&](int rank) {
      SparseReduceArgs args = ranks[rank].reduce_args(sharded, landing_used);
      args.drop = drop;
      return args;
    });
    const auto error = group.take_error();
    expect(!error || (error->kind == ErrorKind::capacity && !drop), "the group goes on");
  }
}

}  // namespace
}  // namespace jax_ep
