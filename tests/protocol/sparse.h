// sparse_union and sparse_reduce on bare threads, against sums in a map.
#pragma once

#include <climits>
#include <cmath>
#include <map>
#include <random>

#include "ranks.h"

namespace jax_ep {

constexpr int kEntries = 300, kTableRows = 500, kWidth = 8, kPlaces = kTableRows;

// One rank's buffers. Entries are whole numbers, so that sums are exact in any order.
struct SparseRank {
  std::vector<int32_t> ids = std::vector<int32_t>(kEntries);
  std::vector<float> values = std::vector<float>(kEntries * kWidth);
  int32_t missing[2] = {1, 2}, all_missing[2] = {};
  std::vector<int32_t> indices = std::vector<int32_t>(kPlaces), bounds = std::vector<int32_t>(kRanks + 1);
  std::vector<int32_t> places = std::vector<int32_t>(kRanks * kEntries);
  std::vector<uint32_t> bits = std::vector<uint32_t>(bitmap_words(kTableRows));
  std::vector<int32_t> prefix = std::vector<int32_t>(bitmap_words(kTableRows)),
                       coop_counts = std::vector<int32_t>(kMaxCoops);
  std::vector<float> result = std::vector<float>(kPlaces * kWidth);
  std::vector<Run> runs = std::vector<Run>(kRanks * kPlaces);
  std::vector<int32_t> heads = std::vector<int32_t>(kPlaces), next = ids, list_entries = ids, begins = heads,
                       listed = {0}, long_places = ids, long_lists = {0}, sent = std::vector<int32_t>(kRanks);
  std::vector<char> landing =
      std::vector<char>(landing_bytes(kRanks, kPlaces, landing_room(kEntries, kRanks, false), kWidth * 4));
  std::vector<float> partials = std::vector<float>(kEntries * kWidth);

  // One id or two are often drawn, so that their runs are long; some name no row.
  void draw(std::mt19937& random) {
    const int often = 1 + random() % 2;
    for (int32_t& id : ids) id = random() % 3 ? random() % kTableRows : random() % often * 77;
    for (const int32_t odd : {INT_MIN, -1, kTableRows, INT_MAX}) ids[random() % kEntries] = odd;
    for (float& x : values) x = static_cast<float>(random() % 64);
  }

  SparseUnionArgs union_args(bool sharded) {
    SparseUnionArgs a{};
    a.entries = kEntries, a.num_rows = kTableRows, a.capacity = kPlaces, a.sharded = sharded;
    a.ids = ids.data(), a.missing = missing, a.indices = indices.data();
    a.places = places.data(), a.bounds = bounds.data(), a.all_missing = all_missing;
    a.bits = bits.data(), a.prefix = prefix.data(), a.coop_counts = coop_counts.data();
    return a;
  }

  SparseReduceArgs reduce_args(bool sharded, bool landing_used = true) {
    SparseReduceArgs a{};
    a.entries = kEntries, a.hidden = kWidth, a.capacity = kPlaces, a.places_kept = kPlaces, a.sharded = sharded;
    a.scale = 1, a.values = reinterpret_cast<char*>(values.data()), a.places = places.data();
    a.bounds = bounds.data(), a.result = reinterpret_cast<char*>(result.data()), a.runs = runs.data();
    a.heads = heads.data(), a.next = next.data(), a.list_entries = list_entries.data(), a.begins = begins.data();
    a.listed = listed.data(), a.long_places = long_places.data(), a.long_lists = long_lists.data();
    a.landing_room = landing_used ? landing_room(kEntries, kRanks, sharded) : 0;
    a.sent = sent.data(), a.landing = landing.data();
    a.partials = partials.data();
    return a;
  }
};

inline std::vector<SparseRank> draw_sparse_ranks(unsigned seed) {
  std::vector<SparseRank> ranks(kRanks);
  std::mt19937 random(seed);
  for (SparseRank& rank : ranks) rank.draw(random);
  return ranks;
}

inline void unite_on_all_ranks(const Group& group, std::vector<SparseRank>& ranks, bool sharded) {
  run_on_all_ranks(group, [&](int rank) { return ranks[rank].union_args(sharded); });
}

inline void check_sparse(const std::vector<SparseRank>& ranks, bool sharded) {
  std::map<int, float> first_values;  // of each row: the sum of the first value of its entries
  for (const SparseRank& rank : ranks)
    for (int i = 0; i < kEntries; ++i)
      if (rank.ids[i] >= 0 && rank.ids[i] < kTableRows) first_values[rank.ids[i]] += rank.values[i * kWidth];
  for (int r = 0; r < kRanks; ++r) {
    const int begin = sharded ? r * kTableRows / kRanks : 0;
    const int end = sharded ? (r + 1) * kTableRows / kRanks : kTableRows;
    int next_row = 0;
    for (const auto& [id, value] : first_values) {
      if (id < begin || id >= end) continue;
      expect(ranks[r].indices[next_row] == id, "ids are the sorted union");
      expect(ranks[r].result[next_row * kWidth] == value, "rows are sums");
      ++next_row;
    }
    for (; next_row < kPlaces; ++next_row)
      expect(ranks[r].indices[next_row] == kTableRows && ranks[r].result[next_row * kWidth] == 0,
             "the rest is padding");
    expect(ranks[r].all_missing[0] == kRanks && ranks[r].all_missing[1] == 2 * kRanks, "counters are added up");
  }
}

inline void sparse_reductions(int times) {
  Group group({{0, 1, 2, 3}}, 20.0, /*poison=*/true);
  for (int i = 0; i < times; ++i) {
    const bool sharded = i % 2, landing_used = i % 4 == 0;
    std::vector<SparseRank> ranks = draw_sparse_ranks(3 + i);
    unite_on_all_ranks(group, ranks, sharded);
    run_on_all_ranks(group, [&](int rank) { return ranks[rank].reduce_args(sharded, landing_used); });
    check_sparse(ranks, sharded);
  }
  expect(!group.take_error(), "no error is reported");
}

// A rank that is lost between the two steps: nobody returns while a peer may still read its rows.
inline void lost_sparse_rank() {
  Group group({{0, 1, 2, 3}}, 0.2, /*poison=*/false);
  std::vector<SparseRank> ranks = draw_sparse_ranks(4);
  unite_on_all_ranks(group, ranks, /*sharded=*/false);
  run_on_all_ranks(group, [&](int rank) { return ranks[rank].reduce_args(false); }, /*absent=*/2);
  const auto error = group.take_error();
  expect(error && error->kind == ErrorKind::peer_timeout, "a lost rank is a PeerTimeoutError");
  expect(std::isnan(ranks[0].result[0]), "results are NaN after a failure");
}

}  // namespace jax_ep
