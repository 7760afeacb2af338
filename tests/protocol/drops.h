// dispatch of more rows than ranks have, where it may drop: max-min fair quotas, the same by both ways of routing.
#pragma once

#include "moe.h"

namespace jax_ep {

// [E][R] assignments that name an expert, of each source; `kept`: that have a row.
inline std::vector<std::vector<int>> count_assignments(const std::vector<Rank>& ranks, bool kept) {
  std::vector<std::vector<int>> counts(kExperts, std::vector<int>(kRanks));
  for (int source = 0; source < kRanks; ++source)
    for (int i = 0; i < ranks[source].count * kTopK; ++i) {
      const int id = ranks[source].ids[i];
      if (id >= 0 && id < kExperts && (!kept || ranks[source].targets[i] >= 0)) ++counts[id][source];
    }
  return counts;
}

// Who does not get all that it asks for gets as much as any other, but for the one thing that is left over.
inline void check_fair(const std::vector<int>& demand, const std::vector<int>& given, int room) {
  int sum = 0;
  bool short_of = false;
  for (size_t i = 0; i < demand.size(); ++i) {
    expect(given[i] <= demand[i], "nobody gets more than it asks for");
    sum += given[i];
    if (given[i] == demand[i]) continue;
    short_of = true;
    for (const int other : given) expect(other <= given[i] + 1, "quotas are fair");
  }
  expect(short_of ? sum == room : sum <= room, "no room is left while somebody asks for more");
}

inline void check_quotas(const std::vector<Rank>& ranks, int capacity) {
  const auto demand = count_assignments(ranks, false), kept = count_assignments(ranks, true);
  const auto steps = [](const std::vector<int>& rows) {
    int sum = 0;
    for (const int count : rows) sum += count;
    return ceil_div(sum, kAlignment);
  };
  for (int owner = 0; owner < kRanks; ++owner) {
    std::vector<int> demand_steps, given;
    for (int e = 0; e < kLocal; ++e) {
      const int expert = owner * kLocal + e, size = ranks[owner].sizes[e];
      demand_steps.push_back(steps(demand[expert]));
      given.push_back(size / kAlignment);
      expect(steps(kept[expert]) == given[e], "group_sizes are the padded rows that are kept");
      check_fair(demand[expert], kept[expert], size);
    }
    check_fair(demand_steps, given, capacity / kAlignment);
  }
}

// Every second assignment is of one expert, so that its rank, and it alone, has too few rows.
inline void drops(int tokens, const std::vector<Way>& ways) {
  const std::shared_ptr<Group> group = make_group(20.0, /*poison=*/true);
  const int capacity = tokens * kTopK / kAlignment * kAlignment;
  std::vector<Rank> drawn = draw_ranks(tokens, 6), first;
  for (Rank& rank : drawn)
    for (int i = 0; i < rank.count * kTopK; i += 2) rank.ids[i] = 5;
  for (const Way way : ways) {
    std::vector<Rank> ranks = drawn;
    run_on_all_ranks(*group, [&](int rank) {
      DispatchArgs args = ranks[rank].dispatch_args(way);
      args.capacity = capacity, args.drop = true;
      return args;
    });
    check_quotas(ranks, capacity);
    if (first.empty()) first = ranks;
    int dropped = 0;
    for (int rank = 0; rank < kRanks; ++rank) {
      expect(ranks[rank].targets == first[rank].targets, "all ways give an assignment the same row");
      expect(ranks[rank].dropped == first[rank].dropped, "and drop as many");
      dropped += ranks[rank].dropped;
    }
    expect(dropped > 0, "rows are dropped");
  }
  expect(!group->take_error(), "no error is reported");
}

}  // namespace jax_ep
