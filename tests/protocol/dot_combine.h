// ragged_dot_combine on bare threads: coops of a rank multiply, and combine what is written. Sums of what was
// multiplied, of one product and of two; errors; and a rank that never comes.
#pragma once

#include "dispatch_dot.h"

namespace jax_ep {

constexpr int kContraction = 5;

struct DotCombineRank : Rank {
  std::vector<float> lhs = std::vector<float>(kCapacity * kContraction);
  std::vector<float> rhs = std::vector<float>(kLocal * kContraction * kHidden);
  std::vector<float> product = std::vector<float>(kCapacity * kHidden), sums = combined;
  std::vector<uint64_t> words = std::vector<uint64_t>(DotCombineWords(kCapacity).count());
  std::vector<int32_t> order = std::vector<int32_t>((kRanks - 1) * kMostTokens);

  explicit DotCombineRank(int tokens) { count = tokens; }

  DotCombineArgs dot_args() {
    DotCombineArgs a{};
    static_cast<CombineArgs&>(a) = combine_args();
    a.outputs = nullptr, a.weighted = true, a.contraction = kContraction, a.local_experts = kLocal;
    a.lhs = reinterpret_cast<char*>(lhs.data()), a.rhs = reinterpret_cast<char*>(rhs.data());
    a.group_sizes = sizes.data(), a.product = reinterpret_cast<char*>(product.data());
    a.words = words.data(), a.order = order.data();
    return a;
  }
};

// Routed by a dispatch, whose rows are not looked at.
inline void route(const Group& group, std::vector<DotCombineRank>& ranks, std::mt19937& random, Skew skew) {
  for (DotCombineRank& rank : ranks) {
    for (float& x : rank.weights) x = static_cast<int>(random() % 1000) / 1000.0f;
    for (auto* const values : {&rank.lhs, &rank.rhs})
      for (float& x : *values) x = static_cast<int>(random() % 2001) / 1000.0f - 1;
    for (uint64_t& word : rank.words) word = random() + (uint64_t{random()} << 32);  // a workspace holds anything
    for (int32_t& item : rank.order) item = static_cast<int32_t>(random());
    for (int i = 0; i < kMostTokens * kTopK; ++i) {  // -1 skips, kExperts is invalid
      const int id = skew == Skew::one_expert ? 5 : static_cast<int>(random() % (kExperts + 2)) - 1;
      rank.ids[i] = i < rank.count * kTopK && (skew != Skew::one_token || i < kTopK) ? id : -1;
    }
  }
  on_all_ranks(group, [&](const Comm& comm, int rank, const Coop& coop) {
    DispatchArgs args = ranks[rank].dispatch_args(Way::straight);
    args.num_experts = kLocal * comm.size;
    run_in_float32(comm, args, coop);
  });
}

// Every row of the product; then the bits of combine.
inline void check_dot_combine(const Group& group, std::vector<DotCombineRank>& ranks) {
  for (DotCombineRank& rank : ranks) {
    int row = 0;
    for (int e = 0; e < kLocal; ++e)
      for (const int end = row + rank.sizes[e]; row < end; ++row)
        for (int h = 0; h < kHidden; ++h) {
          double exact = 0;
          for (int k = 0; k < kContraction; ++k)
            exact += double{rank.lhs[row * kContraction + k]} * rank.rhs[(e * kContraction + k) * kHidden + h];
          expect(std::fabs(rank.product[row * kHidden + h] - exact) < 1e-4, "a row is multiplied by its expert");
        }
    for (int i = row * kHidden; i < kCapacity * kHidden; ++i)
      expect(rank.product[i] == 0, "rows of no expert are zero");
    rank.sums = rank.combined;
  }
  on_all_ranks(group, [&](const Comm& comm, int rank, const Coop& coop) {
    CombineArgs args = ranks[rank].combine_args();
    args.outputs = reinterpret_cast<char*>(ranks[rank].product.data());
    run_in_float32(comm, args, coop);
  });
  for (const DotCombineRank& rank : ranks)
    for (int i = 0; i < rank.count * kHidden; ++i)
      expect(rank.sums[i] == rank.combined[i], "sums have the bits of combine");
}

inline void dot_combines(int tokens, int times) {
  const std::shared_ptr<Group> group = make_group(20.0, /*poison=*/true);
  std::vector<DotCombineRank> ranks(kRanks, DotCombineRank(tokens));
  std::mt19937 random(11);
  for (int i = 0; i < times; ++i) {
    route(*group, ranks, random, static_cast<Skew>(i % 3));
    on_all_ranks(*group, [&](const Comm& comm, int rank, const Coop& coop) {
      run_in_float32(comm, ranks[rank].dot_args(), coop);
    });
    check_dot_combine(*group, ranks);
  }
  expect(!group->take_error(), "no error is reported");
}

// A row that rank 1 does not have: no rank delivers, and the next call finds the group in order.
inline void dot_combine_out_of_bounds(int tokens) {
  const std::shared_ptr<Group> group = make_group(20.0, /*poison=*/true);
  std::vector<DotCombineRank> ranks(kRanks, DotCombineRank(tokens));
  std::mt19937 random(13);
  for (const bool broken : {true, false}) {
    route(*group, ranks, random, Skew::none);
    if (broken) ranks[1].rows[7] = kCapacity + 7;
    on_all_ranks(*group, [&](const Comm& comm, int rank, const Coop& coop) {
      run_in_float32(comm, ranks[rank].dot_args(), coop);
    });
    if (!broken) break;
    for (const DotCombineRank& rank : ranks) expect(std::isnan(rank.combined[0]), "no rank delivers");
    const auto error = group->take_error();
    expect(error && error->kind == "InvalidRoutingError", "a row out of bounds is an InvalidRoutingError");
  }
  check_dot_combine(*group, ranks);
}

inline void lost_dot_combine_rank(int tokens) {
  Group group({{0, 1, 2, 3}}, 0.2, /*poison=*/false);
  std::vector<DotCombineRank> ranks(kRanks, DotCombineRank(tokens));
  std::mt19937 random(14);
  Group whole({{0, 1, 2, 3}}, 20.0, /*poison=*/false);
  route(whole, ranks, random, Skew::none);
  on_all_ranks(group, [&](const Comm& comm, int rank, const Coop& coop) {
    if (rank != 2) run_in_float32(comm, ranks[rank].dot_args(), coop);
  });
  const auto error = group.take_error();
  expect(error && error->kind == "PeerTimeoutError", "a lost rank is a PeerTimeoutError");
  for (const int rank : {0, 1, 3}) expect(std::isnan(ranks[rank].combined[0]), "sums are NaN after a failure");
}

}  // namespace jax_ep
