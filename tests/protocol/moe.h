// dispatch and combine on bare threads: what their rows and counts must be, and a rank that never comes.
#pragma once

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <random>

#include "kernels/signature.h"
#include "ranks.h"

namespace jax_ep {

constexpr int kTopK = 3, kHidden = 128, kExperts = 8;
constexpr int kLocal = kExperts / kRanks, kAlignment = 4;
constexpr int kMaxTokens = 530;  // more than one chunk, and routing for every coop
constexpr int kCapacity = (kRanks * kMaxTokens * kTopK / kAlignment + kLocal) * kAlignment;

// How tokens travel. In `slots` they are not expanded, nor in `float8_slots`.
enum class Way { straight, float8, few, few_float8, slots, float8_slots };
constexpr int kWays = 6;
constexpr bool is_float8(Way way) { return way == Way::float8 || way == Way::few_float8 || way == Way::float8_slots; }

// One rank's buffers for a dispatch and the combine after it.
struct Rank {
  int count;  // of tokens
  std::vector<float> tokens = std::vector<float>(kMaxTokens * kHidden);
  std::vector<float> weights = std::vector<float>(kMaxTokens * kTopK);
  std::vector<int32_t> ids = std::vector<int32_t>(kMaxTokens * kTopK);
  std::vector<float> rows = std::vector<float>(kCapacity * kHidden);
  std::vector<int32_t> indices = std::vector<int32_t>(kCapacity);
  std::vector<int32_t> sizes = std::vector<int32_t>(kLocal), targets = std::vector<int32_t>(kMaxTokens * kTopK);
  std::vector<int32_t> row_of = std::vector<int32_t>(kRanks * kMaxTokens * kTopK);
  std::vector<float> row_weights = std::vector<float>(kRanks * kMaxTokens * kTopK);
  std::vector<int32_t> counts = std::vector<int32_t>(kRanks * kLocal);
  int32_t dropped = 0, invalid = 0;
  std::vector<int32_t> scratch = std::vector<int32_t>(route_scratch_ints(kExperts, kRanks, /*drop=*/true));
  std::vector<char> wire = std::vector<char>(kRanks * kMaxTokens * kHidden * sizeof(float));
  std::vector<float> combined = std::vector<float>(kMaxTokens * kHidden);
  std::vector<float> landing = std::vector<float>(kRanks * kMaxTokens * kHidden);

  DispatchArgs dispatch_args(Way way) {
    DispatchArgs a{};
    a.num_tokens = count, a.top_k = kTopK, a.hidden = kHidden, a.num_experts = kExperts, a.capacity = kCapacity;
    a.alignment = kAlignment;
    a.wire = is_float8(way) ? Wire::float8 : Wire::plain;
    a.expand = way != Way::slots && way != Way::float8_slots;
    a.by_assignments = way != Way::straight && way != Way::float8 && routes_by_assignments(count, kTopK);
    // Not eager are those that go straight to their rows. No group of a coop's lanes has both.
    a.eager = a.by_assignments || a.wire == Wire::float8 || !a.expand ? count : count / 2 / Coop::lanes * Coop::lanes;
    a.token_weights = weights.data(), a.expert_ids = ids.data();
    a.tokens = reinterpret_cast<char*>(tokens.data()), a.rows = reinterpret_cast<char*>(rows.data());
    a.indices = indices.data();
    a.group_sizes = sizes.data(), a.targets = targets.data(), a.row_of = row_of.data(), a.weights = row_weights.data();
    a.counts = counts.data(), a.dropped = &dropped, a.invalid = &invalid, a.route_scratch = scratch.data();
    a.landing = wire.data();
    return a;
  }

  CombineArgs combine_args() {
    CombineArgs a{};
    a.num_tokens = count, a.top_k = kTopK, a.hidden = kHidden, a.capacity = kCapacity;
    a.rows = reinterpret_cast<char*>(rows.data()), a.weights = row_weights.data(), a.targets = targets.data();
    a.row_of = row_of.data(), a.combined = reinterpret_cast<char*>(combined.data());
    a.landing = reinterpret_cast<char*>(landing.data());
    return a;
  }
};

// The rows that the slots of a dispatch are, in their place.
inline void expand_rows(std::vector<Rank>& ranks) {
  for (Rank& rank : ranks) {
    const std::vector<float> slots = rank.rows;
    for (int row = 0; row < kCapacity; ++row)
      for (int h = 0; h < kHidden; ++h)
        rank.rows[row * kHidden + h] = rank.indices[row] < 0 ? 0 : slots[rank.indices[row] * kHidden + h];
  }
}

inline void fill(std::vector<Rank>& ranks, std::mt19937& random) {
  for (Rank& rank : ranks) {
    for (float& x : rank.tokens) x = static_cast<int>(random() % 2001) / 1000.0f - 1;
    for (float& x : rank.weights) x = static_cast<int>(random() % 1000) / 1000.0f;
    for (int i = 0; i < kMaxTokens * kTopK; ++i)  // -1 skips, kExperts is invalid
      rank.ids[i] = i < rank.count * kTopK ? static_cast<int>(random() % (kExperts + 2)) - 1 : -1;
  }
}

inline std::vector<Rank> draw_ranks(int tokens, unsigned seed) {
  std::vector<Rank> ranks(kRanks, Rank{tokens});
  std::mt19937 random(seed);
  fill(ranks, random);
  return ranks;
}

inline void dispatch_on_all_ranks(const Group& group, std::vector<Rank>& ranks, Way way, int absent = -1) {
  run_on_all_ranks(group, [&](int rank) { return ranks[rank].dispatch_args(way); }, absent);
}

inline void combine_on_all_ranks(const Group& group, std::vector<Rank>& ranks) {
  run_on_all_ranks(group, [&](int rank) { return ranks[rank].combine_args(); });
}

// dispatch followed by combine of the very rows gives each token times the sum of its valid weights.
inline void check_round_trip(const std::vector<Rank>& ranks, float tolerance) {
  for (const Rank& rank : ranks)
    for (int t = 0; t < rank.count; ++t) {
      float weight = 0;
      for (int k = 0; k < kTopK; ++k) {
        const int id = rank.ids[t * kTopK + k];
        if (id >= 0 && id < kExperts) weight += rank.weights[t * kTopK + k];
      }
      for (int h = 0; h < kHidden; ++h)
        expect(std::fabs(rank.combined[t * kHidden + h] - weight * rank.tokens[t * kHidden + h]) <= tolerance,
               "combine(dispatch(x)) is x times its weights");
    }
}

inline void check_counts(const std::vector<Rank>& ranks) {
  for (int owner = 0; owner < kRanks; ++owner)
    for (int e = 0; e < kLocal; ++e) {
      int rows = 0;
      for (const Rank& source : ranks)
        for (const int id : source.ids) rows += id == owner * kLocal + e;
      const int padded = (rows + kAlignment - 1) / kAlignment * kAlignment;
      expect(ranks[owner].sizes[e] == padded, "group_sizes are the padded counts");
    }
}

inline void round_trip(const Group& group, std::vector<Rank>& ranks, Way way, std::mt19937& random) {
  fill(ranks, random);
  dispatch_on_all_ranks(group, ranks, way);
  check_counts(ranks);
  if (!ranks[0].dispatch_args(way).expand) expand_rows(ranks);
  combine_on_all_ranks(group, ranks);
  check_round_trip(ranks, is_float8(way) ? 0.2f : 1e-5f);
}

// A dispatch, and a combine in which rank 1 has been handed a row that it does not have.
inline void combine_out_of_bounds(const Group& group, std::vector<Rank>& ranks, int index) {
  dispatch_on_all_ranks(group, ranks, Way::straight);
  ranks[1].row_of[index] = kCapacity + 7;
  combine_on_all_ranks(group, ranks);
}

// The row is not read, no rank delivers, and all say so.
inline void row_out_of_bounds(Group& group, int tokens, int index) {
  std::vector<Rank> ranks = draw_ranks(tokens, 3);
  combine_out_of_bounds(group, ranks, index);
  for (int rank = 0; rank < kRanks; ++rank) {
    expect(std::isnan(ranks[rank].combined[0]), "no rank delivers what another did not send");
    const auto seen = group.reported({0, rank});
    expect(seen && seen->kind == ErrorKind::invalid_routing, "every rank reports it");
  }
  const auto error = group.take_error();
  expect(error && error->message.find("rank 1: routing.row_of holds") != std::string::npos, "the leaf is named");
  expect(!group.take_error(), "and reported once");
}
inline void rows_out_of_bounds(int times) {
  const std::shared_ptr<Group> group = make_group(20.0, /*poison=*/true);
  for (int i = 0; i < times; ++i) row_out_of_bounds(*group, kMaxTokens, i * 7 % (kMaxTokens * kTopK));
}

// A rank that never comes: the others give up within the timeout, and fill their results. Whether all name it.
inline bool lost_rank_is_named(int tokens, Way way, double timeout_seconds) {
  Group group({{0, 1, 2, 3}}, timeout_seconds, /*poison=*/false);
  std::vector<Rank> ranks = draw_ranks(tokens, 2);
  dispatch_on_all_ranks(group, ranks, way, /*absent=*/2);
  const auto error = group.take_error();
  expect(error && error->kind == ErrorKind::peer_timeout, "a lost rank is a PeerTimeoutError");
  expect(std::isnan(ranks[0].rows[0]), "results are NaN after a failure");
  bool named = true;
  for (const int rank : {0, 1, 3}) {
    const auto seen = group.reported({0, rank});
    expect(seen.has_value(), "every rank reports the failure");
    named &= seen->message.find("rank 2") != std::string::npos;
  }
  return named;
}

// On a busy machine a rank that did come may be late itself: then with more time.
inline void lost_rank(int tokens, Way way) {
  double timeout_seconds = 0.2;
  while (!lost_rank_is_named(tokens, way, timeout_seconds)) {
    timeout_seconds *= 2;
    expect(timeout_seconds < 10, "every rank names the lost one");
  }
}

// One rank runs another op, or the op with another number of tokens: nothing is pushed, and the error names both calls.
inline void different_ops(bool other_op) {
  Group group({{0, 1, 2, 3}}, 20.0, /*poison=*/false);
  std::vector<Rank> ranks = draw_ranks(40, 3);
  if (!other_op) ranks[2].count = kMaxTokens;
  const auto signed_by = [](Comm comm, const auto& args) {
    comm.signature = signature_of(args);
    comm.tag = tag_of(comm.signature);
    return comm;
  };
  on_all_ranks(group, [&](const Comm& comm, int rank, const Coop& coop) {
    const CombineArgs combine = ranks[rank].combine_args();
    const DispatchArgs dispatch = ranks[rank].dispatch_args(Way::few);
    if (rank == 2 && other_op)
      run_in_float32(signed_by(comm, combine), combine, coop);
    else
      run_in_float32(signed_by(comm, dispatch), dispatch, coop);
  });
  const auto error = group.take_error();
  expect(error && error->kind == ErrorKind::mismatch, "ranks that run different ops learn of it");
  for (const char* part : {"dispatch float32 T=40", other_op ? "combine float32 T=40" : "T=530", "rank 2"})
    expect(error->message.find(part) != std::string::npos, part);
  for (const float x : ranks[0].rows) expect(std::isnan(x), "nothing is delivered");
}

}  // namespace jax_ep
