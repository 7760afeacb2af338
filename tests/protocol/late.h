// Coops that begin when all others of their rank have ended, as CTAs do for which a GPU has no SM before: ops of few
// tokens end all the same, and give what they always give.
#pragma once

#include <atomic>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "moe.h"

namespace jax_ep {

// Every rank on kCoops threads, of which `late` begins when the others have ended. The group must not be poisoned: to
// poison, coops meet.
template <class Body>
void on_all_ranks_late(const Group& group, int late, Body body) {
  std::vector<std::atomic<int>> ended(group.size());
  on_all_ranks(group, [&](const Comm& comm, int rank, const Coop& coop) {
    while (coop.index == late && ended[rank] < kCoops - 1) std::this_thread::yield();
    body(comm, rank, coop);
    ++ended[rank];
  });
}

// combine, which returns scalars too, and its gradient.
inline void late_senders(int tokens, int late) {
  Group group({{0, 1, 2, 3}}, 20.0, /*poison=*/false);
  std::vector<Rank> ranks = draw_ranks(tokens, 6);
  dispatch_on_all_ranks(group, ranks, Way::straight);
  check_counts(ranks);
  std::vector<std::vector<float>> returned(kRanks, std::vector<float>(kMaxTokens * kTopK, -1)), scattered(kRanks);
  on_all_ranks_late(group, late, [&](const Comm& comm, int rank, const Coop& coop) {
    CombineArgs args = ranks[rank].combine_args();
    args.scalars = args.weights, args.returned = returned[rank].data();
    run_in_float32(comm, args, coop);
  });
  check_round_trip(ranks, 1e-5f);
  for (int rank = 0; rank < kRanks; ++rank)
    for (int i = 0; i < tokens * kTopK; ++i) {
      const int id = ranks[rank].ids[i];
      expect(returned[rank][i] == (id < 0 || id >= kExperts ? 0 : ranks[rank].weights[i]), "scalars come home");
    }
  for (auto& rows : scattered) rows.assign(kCapacity * kHidden, -1);
  on_all_ranks_late(group, late, [&](const Comm& comm, int rank, const Coop& coop) {
    const Rank& own = ranks[rank];
    ScatterArgs args{};
    args.num_tokens = tokens, args.top_k = kTopK, args.hidden = kHidden, args.local_experts = kLocal;
    args.capacity = kCapacity, args.alignment = kAlignment;
    args.tokens = reinterpret_cast<const char*>(own.tokens.data()), args.targets = own.targets.data();
    args.row_of = own.row_of.data(), args.counts = own.counts.data();
    args.rows = reinterpret_cast<char*>(scattered[rank].data());
    run_in_float32(comm, args, coop);
  });
  for (int rank = 0; rank < kRanks; ++rank)
    expect(scattered[rank] == ranks[rank].rows, "combine's gradient puts tokens where dispatch does");
  expect(!group.take_error(), "no error is reported");
}

// However late they come, somebody is told that all have begun, and nobody waits for long.
inline void last_to_begin_stays() {
  uint64_t begun = 0;
  const Coop alone;
  for (int i = 0; i < 3; ++i) expect(!all_begin(alone, &begun, 4), "who comes before the last leaves");
  expect(all_begin(alone, &begun, 4), "the last to begin stays");
}

}  // namespace jax_ep
