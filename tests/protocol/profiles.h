// Profiles of ops on bare threads: whole ones, and those that begin and end while ops run.
#pragma once

#include <atomic>
#include <chrono>
#include <set>
#include <utility>

#include "moe.h"
#include "runtime/profiler.h"

namespace jax_ep {

// A device's clock that is 5000 ahead of the host's, and gains 100 in a profile of 1000, or loses as much.
inline void host_clock() {
  for (const int64_t gain : {100, -100}) {
    const HostClock clock({5000 + 700, 700}, {5000 + 1700 + static_cast<uint64_t>(gain), 1700});
    expect(clock.of(5000 + 700) == 700, "a profile begins at its first sample");
    expect(clock.of(5000 + 1200 + gain / 2) == 1200, "drift is shared out evenly");
    expect(clock.of(5000 + 1700 + gain) == 1700, "a profile ends at its second sample");
    expect(clock.of(5000 + 600) == 600, "no drift is known before a profile");
    expect(clock.of(5000 + 1800 + gain) == 1800, "nor behind it");
  }
  expect(HostClock({40, 30}, {40, 30}).of(41) == 31, "samples may be of the same moment");
}

// Every CTA of every rank has so many ops in its profile, their phases one after another.
inline void check_profiles(const std::vector<RankProfile>& profiles, uint64_t ops) {
  expect(profiles.size() == kRanks, "every rank has a profile");
  for (const RankProfile& profile : profiles) {
    expect(profile.lost == 0 && profile.unfinished == 0, "profiles are whole");
    std::set<std::pair<int, uint64_t>> seen;
    const Span* before = nullptr;
    for (const Span& span : profile.spans) {
      expect(span.begin_ns <= span.end_ns, "a phase ends after it began");
      expect(!before || before->cta != span.cta || before->end_ns <= span.begin_ns, "phases do not overlap");
      expect(span.phase != Phase::none && span.phase != Phase::give_up, "phases are those of ops that succeed");
      seen.emplace(span.cta, span.epoch);
      before = &span;
    }
    expect(seen.size() == kCoops * ops, "every CTA has every op");
  }
}

// Profiles that begin and end while ops run: the first and the last of them may be cut off.
inline void profiles_of_running_ops() {
  const std::shared_ptr<Group> group = make_group(20.0, /*poison=*/false);
  Profiler profiler(group, kCoops);
  std::vector<Rank> ranks = draw_ranks(40, 3);
  std::atomic<bool> running = true;
  size_t spans = 0;
  std::thread profiling([&] {
    while (running) {
      profiler.start();
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      for (const RankProfile& each : profiler.stop()) spans += each.spans.size();
    }
  });
  for (int i = 0; i < 50; ++i) dispatch_on_all_ranks(*group, ranks, Way::straight);
  running = false;
  profiling.join();
  for (int rank = 0; rank < kRanks; ++rank) {
    const auto last = profiler.last_of({0, rank});
    expect(last && last->op == OpKind::dispatch && last->phase == Phase::none, "a rank has left its last op");
  }
  expect(spans > 0, "ops are profiled");
  expect(!group->take_error(), "a profile does not disturb them");
}

// A profile that ends while ranks wait for the last one has the phases that ended, and says that ops go on.
inline void profile_cut_short() {
  const std::shared_ptr<Group> group = make_group(20.0, /*poison=*/false);
  Profiler profiler(group, kCoops);
  std::vector<Rank> ranks = draw_ranks(40, 4);
  profiler.start();
  on_all_ranks(*group, [&](const Comm& comm, int rank, const Coop& coop) {
    const bool last = rank == kRanks - 1;
    if (last && coop.index == 0) {
      for (int peer = 0; peer < rank; ++peer)
        spin_until(&comm.own_signal_pad->posted[peer], 1, &comm.own_signal_pad->never, clock_ns() + comm.timeout_ns);
      for (const RankProfile& each : profiler.stop()) {
        expect(each.unfinished > 0 || each.rank_id.rank == rank, "ops that go on are counted");
        for (const Span& span : each.spans)
          expect(span.phase == Phase::count || span.phase == Phase::post, "only what ended is there");
      }
    }
    run_in_float32(comm, ranks[rank].dispatch_args(Way::straight), coop);
  });
  expect(!group->take_error(), "no error is reported");
}

}  // namespace jax_ep
