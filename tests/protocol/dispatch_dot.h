// dispatch_ragged_dot on bare threads: some coops of a rank dispatch and then multiply, the others multiply what is
// here. Products of what was sent, whoever begins late; errors; and a rank that never comes.
#pragma once

#include "late.h"
#include "moe.h"

namespace jax_ep {

constexpr int kColumns = 5;

struct DotRank : Rank {
  std::vector<float> rhs = std::vector<float>(kLocal * kHidden * kColumns);
  std::vector<float> product = std::vector<float>(kCapacity * kColumns);
  std::vector<uint64_t> ready = std::vector<uint64_t>(kCapacity / gemm::kBlockM + 1);

  explicit DotRank(int tokens) { count = tokens; }

  DispatchDotArgs dot_args(int eager, int capacity = kCapacity, bool drop = false) {
    DispatchDotArgs a{};
    static_cast<DispatchArgs&>(a) = dispatch_args(Way::straight);
    a.alignment = 1, a.capacity = capacity, a.drop = drop, a.eager = eager;
    a.columns = kColumns, a.rhs = reinterpret_cast<char*>(rhs.data()), a.ready = ready.data();
    a.product = reinterpret_cast<char*>(product.data());
    return a;
  }
};

inline void fill_dots(std::vector<DotRank>& ranks, std::mt19937& random) {
  for (DotRank& rank : ranks) {
    for (float& x : rank.tokens) x = static_cast<int>(random() % 2001) / 1000.0f - 1;
    for (float& x : rank.rhs) x = static_cast<int>(random() % 2001) / 1000.0f - 1;
    for (uint64_t& word : rank.ready) word = random() + (uint64_t{random()} << 32);  // a workspace holds anything
    for (int i = 0; i < kMostTokens * kTopK; ++i)                                    // -1 skips, kExperts is invalid
      rank.ids[i] = i < rank.count * kTopK ? static_cast<int>(random() % (kExperts + 2)) - 1 : -1;
  }
}

inline void expect_product(const DotRank& owner, int row, const float* token, int expert) {
  for (int column = 0; column < kColumns; ++column) {
    double exact = 0;
    for (int h = 0; h < kHidden; ++h) exact += double{token[h]} * owner.rhs[(expert * kHidden + h) * kColumns + column];
    expect(std::fabs(owner.product[row * kColumns + column] - exact) < 1e-4, "a row is its token times its expert");
  }
}

// Every assignment has its row, by expert, source, token and k, and behind them all is zero.
inline void check_dots(const std::vector<DotRank>& ranks) {
  for (int owner = 0; owner < kRanks; ++owner) {
    int row = 0;
    for (int e = 0; e < kLocal; ++e) {
      const int first = row;
      for (const DotRank& source : ranks)
        for (int i = 0; i < source.count * kTopK; ++i)
          if (source.ids[i] == owner * kLocal + e)
            expect_product(ranks[owner], row++, &source.tokens[i / kTopK * kHidden], e);
      expect(ranks[owner].sizes[e] == row - first, "group_sizes are counts");
    }
    for (; row < kCapacity; ++row)
      for (int column = 0; column < kColumns; ++column)
        expect(ranks[owner].product[row * kColumns + column] == 0, "rows of no expert are zero");
  }
}

inline void dots(int tokens, int times) {
  const std::shared_ptr<Group> group = make_group(20.0, /*poison=*/true);
  std::vector<DotRank> ranks(kRanks, DotRank(tokens));
  std::mt19937 random(7);
  for (int i = 0; i < times; ++i) {
    fill_dots(ranks, random);
    const int eager = tokens * (i % 3) / 2;  // none, half or all of the tokens
    on_all_ranks(*group, [&](const Comm& comm, int rank, const Coop& coop) {
      run_in_float32(comm, ranks[rank].dot_args(eager), coop);
    });
    check_dots(ranks);
  }
  expect(!group->take_error(), "no error is reported");
}

// A coop that begins when all others have ended: those that dispatch do so without it, and the op waits for its tiles.
inline void late_dots(int tokens, int late) {
  Group group({{0, 1, 2, 3}}, 20.0, /*poison=*/false);
  std::vector<DotRank> ranks(kRanks, DotRank(tokens));
  std::mt19937 random(8);
  fill_dots(ranks, random);
  on_all_ranks_late(group, late, [&](const Comm& comm, int rank, const Coop& coop) {
    run_in_float32(comm, ranks[rank].dot_args(tokens / 2), coop);
  });
  check_dots(ranks);
  expect(!group.take_error(), "no error is reported");
}

// Rows that find no room are dropped, or nothing is delivered and the next call finds the group in order.
inline void full_dots(int capacity) {
  Group group({{0, 1, 2, 3}}, 20.0, /*poison=*/true);
  std::vector<DotRank> ranks(kRanks, DotRank(kMostTokens));
  std::mt19937 random(9);
  fill_dots(ranks, random);
  const auto run = [&](int room, bool drop) {
    on_all_ranks(group, [&](const Comm& comm, int rank, const Coop& coop) {
      run_in_float32(comm, ranks[rank].dot_args(100, room, drop), coop);
    });
  };
  run(capacity, /*drop=*/true);
  for (const DotRank& owner : ranks) {
    int row = 0;
    for (int e = 0; e < kLocal; ++e)
      for (const int end = row + owner.sizes[e]; row < end; ++row)
        expect_product(owner, row, &owner.received[row * kHidden], e);
    expect(row == capacity && owner.dropped > 0, "what there is room for is delivered");
  }
  expect(!group.take_error(), "to drop is no error");
  run(capacity, /*drop=*/false);
  for (const DotRank& rank : ranks)
    for (int i = 0; i < capacity * kColumns; ++i) expect(std::isnan(rank.product[i]), "nothing is delivered");
  const auto error = group.take_error();
  expect(error && error->kind == "CapacityError", "a rank without room is a CapacityError");
  run(kCapacity, /*drop=*/false);
  check_dots(ranks);
}

inline void lost_dot_rank() {
  Group group({{0, 1, 2, 3}}, 0.2, /*poison=*/false);
  std::vector<DotRank> ranks(kRanks, DotRank(kMostTokens));
  std::mt19937 random(10);
  fill_dots(ranks, random);
  on_all_ranks(group, [&](const Comm& comm, int rank, const Coop& coop) {
    if (rank != 2) run_in_float32(comm, ranks[rank].dot_args(100), coop);
  });
  const auto error = group.take_error();
  expect(error && error->kind == "PeerTimeoutError", "a lost rank is a PeerTimeoutError");
  for (const int rank : {0, 1, 3}) expect(std::isnan(ranks[rank].product[0]), "results are NaN after a failure");
}

}  // namespace jax_ep
