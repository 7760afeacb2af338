// What a kernel posts is what its op's spec marks for peers, in that order: reach.h makes those buffers reachable.
#pragma once

#include "collective_matmul.h"
#include "moe.h"
#include "sparse.h"

namespace jax_ep {

// Runs an op, and looks into the mail that each rank leaves for itself.
template <class Ranks, class ArgsOf>
void check_posting(const Group& group, Ranks& ranks, ArgsOf args_of) {
  run_on_all_ranks(group, [&](int rank) { return args_of(ranks[rank]); });
  for (int rank = 0; rank < group.size(); ++rank) {
    const SignalPad& signal_pad = *group.signal_pad({0, rank});
    const auto args = args_of(ranks[rank]);
    int buffer = 0;
    OpSpec<std::decay_t<decltype(args)>>::buffers(args, group.size(), [&](const BufferSpec& spec, auto member) {
      if (spec.is_window)
        expect(signal_pad.mail[signal_pad.epoch & 1][rank].buffers[buffer++] == args.*member, spec.name);
    });
    expect(buffer > 0 && buffer <= kMailBuffers, "an op posts no more than its mail holds");
  }
}

inline void posts_what_specs_mark() {
  Group group({{0, 1, 2, 3}}, 20.0, /*poison=*/false);
  std::vector<Rank> routed = draw_ranks(40, 1);
  check_posting(group, routed, [](Rank& rank) { return rank.dispatch_args(Way::straight); });
  check_posting(group, routed, [](Rank& rank) { return rank.combine_args(); });
  std::vector<SparseRank> sparse = draw_sparse_ranks(1);
  check_posting(group, sparse, [](SparseRank& rank) { return rank.union_args(false); });
  check_posting(group, sparse, [](SparseRank& rank) { return rank.reduce_args(false); });
  std::vector<MatmulRank> products(kRanks, MatmulRank({64, 16, 8}, kRanks));
  check_posting(group, products, [](MatmulRank& rank) { return rank.reduce_args(false); });
  check_posting(group, products, [](MatmulRank& rank) { return rank.gather_args(); });
  expect(!group.take_error(), "no error is reported");
}

}  // namespace jax_ep
