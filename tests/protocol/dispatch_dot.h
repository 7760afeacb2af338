// dispatch_ragged_dot on bare threads: the dispatch alone, as a GPU runs it, and with the product. What was sent in
// which order, what was counted, products, whoever begins late; errors; and a rank that never comes.
#pragma once

#include <algorithm>

#include "late.h"
#include "moe.h"

namespace jax_ep {

constexpr int kColumns = 5;

enum class Form { rows_alone, with_product };
enum class Skew { none, one_expert, one_token };

struct DotRank : Rank {
  std::vector<float> rhs = std::vector<float>(kLocal * kHidden * kColumns);
  std::vector<float> product = std::vector<float>(kCapacity * kColumns);
  std::vector<uint64_t> words = std::vector<uint64_t>(ArrivalWords(kCapacity).count());
  std::vector<int32_t> order = std::vector<int32_t>(kRanks * kMostTokens), told_sizes = std::vector<int32_t>(kLocal);

  explicit DotRank(int tokens) { count = tokens; }

  DispatchDotArgs dot_args(int eager, int capacity = kCapacity, bool drop = false) {
    DispatchDotArgs a{};
    static_cast<DispatchArgs&>(a) = dispatch_args(Way::straight);
    a.alignment = 1, a.capacity = capacity, a.drop = drop, a.eager = eager;
    a.columns = kColumns, a.rhs = reinterpret_cast<char*>(rhs.data());
    a.product = reinterpret_cast<char*>(product.data()), a.words = words.data(), a.order = order.data();
    a.sizes = told_sizes.data();
    return a;
  }
};

// A workspace holds anything.
inline void fill_words(DotRank& rank, std::mt19937& random) {
  for (uint64_t& word : rank.words) word = random() + (uint64_t{random()} << 32);
  for (int32_t& token : rank.order) token = static_cast<int32_t>(random());
}

inline void fill_dots(std::vector<DotRank>& ranks, std::mt19937& random, Skew skew = Skew::none) {
  for (DotRank& rank : ranks) {
    for (float& x : rank.tokens) x = static_cast<int>(random() % 2001) / 1000.0f - 1;
    for (float& x : rank.rhs) x = static_cast<int>(random() % 2001) / 1000.0f - 1;
    fill_words(rank, random);
    for (int i = 0; i < kMostTokens * kTopK; ++i) {  // -1 skips, kExperts is invalid
      const int id = skew == Skew::one_expert ? 5 : static_cast<int>(random() % (kExperts + 2)) - 1;
      rank.ids[i] = i < rank.count * kTopK && (skew != Skew::one_token || i < kTopK) ? id : -1;
    }
  }
}

inline void run_dot(const Comm& comm, const DispatchDotArgs& args, const Coop& coop, Form form) {
  if (form == Form::rows_alone)
    dispatch_in_order(comm, args, coop);
  else
    run_in_float32(comm, args, coop);
}

inline void expect_product(const DotRank& owner, int row, const float* token, int expert, bool transposed = false) {
  for (int column = 0; column < kColumns; ++column) {
    double exact = 0;
    for (int h = 0; h < kHidden; ++h)
      exact += double{token[h]} * owner.rhs[transposed ? (expert * kColumns + column) * kHidden + h
                                                       : (expert * kHidden + h) * kColumns + column];
    expect(std::fabs(owner.product[row * kColumns + column] - exact) < 1e-4, "a row is its token times its expert");
  }
}

// Calls visit(owner, row, token, expert) for every assignment that has a row where none is dropped; and checks that all
// behind them is zero.
template <class Visit>
void for_each_row(const std::vector<DotRank>& ranks, Form form, Visit visit) {
  for (const DotRank& owner : ranks) {
    int row = 0;
    const int first = static_cast<int>(&owner - ranks.data()) * kLocal;
    for (int e = 0; e < kLocal; ++e)
      for (const DotRank& source : ranks)
        for (int i = 0; i < source.count * kTopK; ++i)
          if (source.ids[i] == first + e) visit(owner, row++, &source.tokens[i / kTopK * kHidden], e);
    for (int i = row * kHidden; i < kCapacity * kHidden; ++i)
      expect(owner.received[i] == 0, "rows of no expert are zero");
    for (int i = row * kColumns; form == Form::with_product && i < kCapacity * kColumns; ++i)
      expect(owner.product[i] == 0, "so are their products");
  }
}

// Every assignment has its row, by expert, source, token and k, and its product.
inline void check_dots(const std::vector<DotRank>& ranks, Form form, bool transposed = false) {
  for_each_row(ranks, form, [&](const DotRank& owner, int row, const float* token, int e) {
    expect(std::equal(token, token + kHidden, &owner.received[row * kHidden]), "a row is its token");
    if (form == Form::with_product) expect_product(owner, row, token, e, transposed);
  });
}

// Each row block has counted the rows of its groups.
inline void check_arrived(const DotRank& rank, const std::vector<int32_t>& sizes, int capacity = kCapacity) {
  const ArrivalWords at(capacity);
  int end = 0;
  for (const int size : sizes) end += size;
  for (int block = 0; block < at.row_blocks; ++block) {
    const int rows = std::min(std::max(end - block * gemm::kBlockM, 0), int{gemm::kBlockM});
    expect(rank.words[at.arrived() + block] == static_cast<uint64_t>(rows), "each row that is here is counted");
  }
  expect(rank.words[at.laid_out()] == ArrivalWords::kYes && rank.told_sizes == rank.sizes,
         "the sizes are said to be there");
  expect(rank.words[at.over()] == ArrivalWords::kYes, "the op is said to be over");
}

// Every rank knows in which order every other sends what is not eager: that of the row blocks of the first rows.
inline void check_order(const std::vector<DotRank>& ranks, int eager, int capacity = kCapacity) {
  for (size_t source = 0; source < ranks.size(); ++source) {
    const DotRank& from = ranks[source];
    const auto key = [&](int token) {
      int first = capacity + gemm::kBlockM;
      for (int k = 0; k < kTopK; ++k)
        if (const int target = from.targets[token * kTopK + k]; target >= 0) first = std::min(first, target % capacity);
      return first / gemm::kBlockM;
    };
    const int32_t* const order = &from.order[source * from.count];
    std::vector<bool> seen(from.count);
    for (int position = eager; position < from.count; ++position) {
      const int token = order[position];
      expect(token >= eager && token < from.count && !seen[token], "the order is a permutation");
      seen[token] = true;
      expect(position == eager || key(order[position - 1]) <= key(token), "tokens are sent by their first rows");
    }
    for (const DotRank& rank : ranks)
      expect(std::equal(order + eager, order + from.count, &rank.order[source * from.count + eager]),
             "all ranks know the order");
  }
}

inline void dots(int tokens, int times) {
  const std::shared_ptr<Group> group = make_group(20.0, /*poison=*/true);
  std::vector<DotRank> ranks(kRanks, DotRank(tokens));
  std::mt19937 random(7);
  for (int i = 0; i < times; ++i) {
    const Skew skew = static_cast<Skew>(i / 3 % 3);
    const int eager = tokens * (i % 3) / 2;  // none, half or all of the tokens
    for (const Form form : {Form::rows_alone, Form::with_product}) {
      fill_dots(ranks, random, skew);
      on_all_ranks(*group, [&](const Comm& comm, int rank, const Coop& coop) {
        run_dot(comm, ranks[rank].dot_args(eager), coop, form);
      });
      check_dots(ranks, form);
      check_order(ranks, eager);
      for (const DotRank& rank : ranks) check_arrived(rank, rank.sizes);
    }
  }
  expect(!group->take_error(), "no error is reported");
}

// A coop that begins when all others have ended: they dispatch without it, and the op waits for its tiles.
inline void late_dots(int tokens, int late) {
  Group group({{0, 1, 2, 3}}, 20.0, /*poison=*/false);
  std::vector<DotRank> ranks(kRanks, DotRank(tokens));
  std::mt19937 random(8);
  fill_dots(ranks, random);
  on_all_ranks_late(group, late, [&](const Comm& comm, int rank, const Coop& coop) {
    run_in_float32(comm, ranks[rank].dot_args(tokens / 2), coop);
  });
  check_dots(ranks, Form::with_product);
  expect(!group.take_error(), "no error is reported");
}

// Rows that find no room are dropped, or nothing is delivered and the next call finds the group in order.
inline void full_dots(int capacity) {
  Group group({{0, 1, 2, 3}}, 20.0, /*poison=*/true);
  std::vector<DotRank> ranks(kRanks, DotRank(kMostTokens));
  std::mt19937 random(9);
  const auto run = [&](int room, bool drop, Form form) {
    fill_dots(ranks, random);
    on_all_ranks(group, [&](const Comm& comm, int rank, const Coop& coop) {
      run_dot(comm, ranks[rank].dot_args(100, room, drop), coop, form);
    });
  };
  for (const Form form : {Form::rows_alone, Form::with_product}) {
    run(capacity, /*drop=*/true, form);
    check_order(ranks, 100, capacity);
    for (const DotRank& owner : ranks) {
      int row = 0;
      for (int e = 0; e < kLocal; ++e)
        for (const int end = row + owner.sizes[e]; form == Form::with_product && row < end; ++row)
          expect_product(owner, row, &owner.received[row * kHidden], e);
      expect(owner.dropped > 0, "what there is no room for is dropped");
      check_arrived(owner, {capacity}, capacity);
    }
    expect(!group.take_error(), "to drop is no error");
    run(capacity, /*drop=*/false, form);
    for (const DotRank& rank : ranks) {
      for (int i = 0; i < capacity * kColumns; ++i) expect(std::isnan(rank.product[i]), "nothing is delivered");
      expect(rank.words[ArrivalWords(capacity).over()] == ArrivalWords::kNothing, "whoever waits is told");
    }
    const auto error = group.take_error();
    expect(error && error->kind == "CapacityError", "a rank without room is a CapacityError");
    run(kCapacity, /*drop=*/false, form);
    check_dots(ranks, form);
  }
}

inline void lost_dot_rank(Form form) {
  Group group({{0, 1, 2, 3}}, 0.2, /*poison=*/false);
  std::vector<DotRank> ranks(kRanks, DotRank(kMostTokens));
  std::mt19937 random(10);
  fill_dots(ranks, random);
  on_all_ranks(group, [&](const Comm& comm, int rank, const Coop& coop) {
    if (rank != 2) run_dot(comm, ranks[rank].dot_args(100), coop, form);
  });
  const auto error = group.take_error();
  expect(error && error->kind == "PeerTimeoutError", "a lost rank is a PeerTimeoutError");
  for (const int rank : {0, 1, 3}) {
    expect(std::isnan(ranks[rank].product[0]), "results are NaN after a failure");
    expect(ranks[rank].words[ArrivalWords(kCapacity).over()] == ArrivalWords::kNothing, "whoever waits is told");
  }
}

}  // namespace jax_ep
