// The kernels on bare threads, without XLA: several ranks, several teams a rank, many ops in a row. Built with
// ThreadSanitizer by .ci/run, so that a missing release or acquire is found by a tool and not by luck.
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <random>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "heap/host_clock.h"
#include "heap/reach.h"
#include "heap/recorder.h"
#include "matmul.h"
#include "ranks.h"
#include "sparse.h"

namespace jax_ep {
namespace {

constexpr int kTopK = 3, kHidden = 128, kExperts = 8;
constexpr int kLocal = kExperts / kRanks, kAlignment = 4;
constexpr int kMostTokens = 530;  // more than one chunk, and routers enough for every team
constexpr int kCapacity = (kRanks * kMostTokens * kTopK / kAlignment + kLocal) * kAlignment;

// How tokens travel.
enum class Way { straight, float8, few, few_float8 };
constexpr int kWays = 4;

// One rank's buffers for a dispatch and the combine after it.
struct Rank {
  int count;  // of tokens
  std::vector<float> tokens = std::vector<float>(kMostTokens * kHidden);
  std::vector<float> weights = std::vector<float>(kMostTokens * kTopK);
  std::vector<int32_t> ids = std::vector<int32_t>(kMostTokens * kTopK);
  std::vector<float> received = std::vector<float>(kCapacity * kHidden);
  std::vector<int32_t> sizes = std::vector<int32_t>(kLocal), targets = std::vector<int32_t>(kMostTokens * kTopK);
  std::vector<int32_t> rows = std::vector<int32_t>(kRanks * kMostTokens * kTopK);
  std::vector<float> arrived = std::vector<float>(kRanks * kMostTokens * kTopK);
  std::vector<int32_t> counts = std::vector<int32_t>(kRanks * kLocal);
  int32_t dropped = 0, invalid = 0;
  std::vector<int32_t> scratch = std::vector<int32_t>(route_scratch_ints(kExperts, kMaxRanks));
  std::vector<char> wire = std::vector<char>(kRanks * kMostTokens * kHidden * sizeof(float));
  std::vector<float> combined = std::vector<float>(kMostTokens * kHidden);
  std::vector<float> landing = std::vector<float>(kRanks * kMostTokens * kHidden);

  DispatchArgs dispatch_args(Way way) {
    DispatchArgs a{};
    a.num_tokens = count, a.top_k = kTopK, a.hidden = kHidden, a.num_experts = kExperts, a.capacity = kCapacity;
    a.alignment = kAlignment;
    a.wire_float8 = way == Way::float8 || way == Way::few_float8,
    a.few = way != Way::straight && way != Way::float8 && are_few(count, kTopK), a.weights = weights.data(),
    a.expert_ids = ids.data();
    a.tokens = reinterpret_cast<char*>(tokens.data()), a.received = reinterpret_cast<char*>(received.data());
    a.group_sizes = sizes.data(), a.targets = targets.data(), a.rows = rows.data(), a.arrived = arrived.data();
    a.counts = counts.data(), a.dropped = &dropped, a.invalid = &invalid, a.scratch = scratch.data();
    a.landing = wire.data(), a.landing_bytes = static_cast<int64_t>(wire.size());
    return a;
  }

  CombineArgs combine_args() {
    CombineArgs a{};
    a.num_tokens = count, a.top_k = kTopK, a.hidden = kHidden, a.capacity = kCapacity;
    a.outputs = reinterpret_cast<char*>(received.data()), a.weights = arrived.data(), a.targets = targets.data();
    a.rows = rows.data(), a.combined = reinterpret_cast<char*>(combined.data());
    a.landing = reinterpret_cast<char*>(landing.data());
    return a;
  }
};

void fill(std::vector<Rank>& ranks, std::mt19937& random) {
  for (Rank& rank : ranks) {
    for (float& x : rank.tokens) x = static_cast<int>(random() % 2001) / 1000.0f - 1;
    for (float& x : rank.weights) x = static_cast<int>(random() % 1000) / 1000.0f;
    for (int i = 0; i < kMostTokens * kTopK; ++i)  // -1 skips, kExperts is invalid
      rank.ids[i] = i < rank.count * kTopK ? static_cast<int>(random() % (kExperts + 2)) - 1 : -1;
  }
}

// dispatch followed by combine of the very rows gives each token times the sum of its valid weights.
void check_round_trip(const std::vector<Rank>& ranks, float tolerance) {
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

void check_counts(const std::vector<Rank>& ranks) {
  for (int owner = 0; owner < kRanks; ++owner)
    for (int e = 0; e < kLocal; ++e) {
      int rows = 0;
      for (const Rank& source : ranks)
        for (const int id : source.ids) rows += id == owner * kLocal + e;
      const int padded = (rows + kAlignment - 1) / kAlignment * kAlignment;
      expect(ranks[owner].sizes[e] == padded, "group_sizes are the padded counts");
    }
}

// A device's clock that is 5000 ahead of the host's, and gains 100 in a recording of 1000, or loses as much.
void host_clock() {
  for (const int64_t gain : {100, -100}) {
    const HostClock clock({5000 + 700, 700}, {5000 + 1700 + static_cast<uint64_t>(gain), 1700});
    expect(clock.of(5000 + 700) == 700, "a recording begins at its first sample");
    expect(clock.of(5000 + 1200 + gain / 2) == 1200, "drift is shared out evenly");
    expect(clock.of(5000 + 1700 + gain) == 1700, "a recording ends at its second sample");
    expect(clock.of(5000 + 600) == 600, "no drift is known before a recording");
    expect(clock.of(5000 + 1800 + gain) == 1800, "nor behind it");
  }
  expect(HostClock({40, 30}, {40, 30}).of(41) == 31, "samples may be of the same moment");
}

// Every squad of every rank has recorded so many ops, their phases one after another.
void check_recordings(const std::vector<Recording>& recordings, uint64_t ops) {
  expect(recordings.size() == kRanks, "every rank has recorded");
  for (const Recording& recording : recordings) {
    expect(recording.lost == 0 && recording.unfinished == 0, "recordings are whole");
    std::set<std::pair<int, uint64_t>> seen;
    const Span* before = nullptr;
    for (const Span& span : recording.spans) {
      expect(span.begin_ns <= span.end_ns, "a phase ends after it began");
      expect(!before || before->squad != span.squad || before->end_ns <= span.begin_ns, "phases do not overlap");
      expect(span.phase != Phase::none && span.phase != Phase::give_up, "phases are those of ops that succeed");
      seen.emplace(span.squad, span.epoch);
      before = &span;
    }
    expect(seen.size() == kTeams * ops, "every squad has recorded every op");
  }
}

std::shared_ptr<Group> make_group(double timeout_seconds, bool poison) {
  return std::make_shared<Group>(std::vector<std::vector<int>>{{0, 1, 2, 3}}, timeout_seconds, poison);
}

void round_trips(int tokens, int times) {
  const std::shared_ptr<Group> shared = make_group(20.0, /*poison=*/true);
  Group& group = *shared;
  Recorder recorder(shared, kTeams);
  recorder.start();
  std::vector<Rank> ranks(kRanks, Rank{tokens});
  std::mt19937 random(1);
  for (int i = 0; i < times; ++i) {
    const Way way = static_cast<Way>(i % kWays);
    fill(ranks, random);
    on_all_ranks(group, [&](const Comm& comm, int rank, const Team& team) {
      run_kernel<float>(comm, ranks[rank].dispatch_args(way), team);
    });
    check_counts(ranks);
    on_all_ranks(group, [&](const Comm& comm, int rank, const Team& team) {
      run_kernel<float>(comm, ranks[rank].combine_args(), team);
    });
    check_round_trip(ranks, way == Way::float8 || way == Way::few_float8 ? 0.2f : 1e-5f);
  }
  expect(!group.take_error(), "no error is reported");
  check_recordings(recorder.stop(), 2 * times);
}

// Recordings that begin and end while ops run: the first and the last of them may be cut off.
void recordings_of_running_ops() {
  const std::shared_ptr<Group> group = make_group(20.0, /*poison=*/false);
  Recorder recorder(group, kTeams);
  std::vector<Rank> ranks(kRanks, Rank{40});
  std::mt19937 random(3);
  fill(ranks, random);
  std::atomic<bool> running = true;
  size_t spans = 0;
  std::thread recording([&] {
    while (running) {
      recorder.start();
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      for (const Recording& each : recorder.stop()) spans += each.spans.size();
    }
  });
  for (int i = 0; i < 50; ++i)
    on_all_ranks(*group, [&](const Comm& comm, int rank, const Team& team) {
      run_kernel<float>(comm, ranks[rank].dispatch_args(Way::straight), team);
    });
  running = false;
  recording.join();
  expect(spans > 0, "ops are recorded");
  expect(!group->take_error(), "recording does not disturb them");
}

// A recording that ends while ranks wait for the last one has the phases that ended, and says that ops go on.
void recording_cut_short() {
  const std::shared_ptr<Group> group = make_group(20.0, /*poison=*/false);
  Recorder recorder(group, kTeams);
  std::vector<Rank> ranks(kRanks, Rank{40});
  std::mt19937 random(4);
  fill(ranks, random);
  recorder.start();
  on_all_ranks(*group, [&](const Comm& comm, int rank, const Team& team) {
    const bool last = rank == kRanks - 1;
    if (last && team.index == 0) {
      for (int peer = 0; peer < rank; ++peer)
        spin_until(&comm.heaps[rank]->posted[peer], 1, &comm.heaps[rank]->never, clock_ns() + comm.timeout_ns);
      for (const Recording& each : recorder.stop()) {
        expect(each.unfinished > 0 || each.seat.rank == rank, "ops that go on are counted");
        for (const Span& span : each.spans)
          expect(span.phase == Phase::count || span.phase == Phase::post, "only what ended is recorded");
      }
    }
    run_kernel<float>(comm, ranks[rank].dispatch_args(Way::straight), team);
  });
  expect(!group->take_error(), "no error is reported");
}

// Two groups as two processes would have them, joined by a socket. What they map is not touched here: the tool does not
// see that both addresses are of one memory, nor that a socket orders them.
void two_processes() {
  int sockets[2];
  expect(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, sockets) == 0, "a pair of sockets is made");
  const auto both = [](auto body) {
    std::thread second([&] { body(1); });
    body(0);
    second.join();
  };
  std::unique_ptr<Group> groups[2];
  both([&](int process) {
    Neighbours neighbours{{{0, 0, 1, 1}}, {-1, -1}};
    neighbours.sockets[1 - process] = sockets[process];
    std::vector<std::vector<int>> lines{process == 0 ? std::vector{0, 1, -1, -1} : std::vector{-1, -1, 2, 3}};
    groups[process] = std::make_unique<Group>(lines, 20.0, /*poison=*/false, neighbours);
  });
  std::vector<Rank> ranks(kRanks, Rank{40});
  both([&](int process) {
    std::vector<std::thread> threads;
    for (int rank = 2 * process; rank < 2 * process + 2; ++rank)
      threads.emplace_back([&, rank] {
        const auto first = reach(*groups[process], {0, rank}, ranks[rank].dispatch_args(Way::straight));
        const auto again = reach(*groups[process], {0, rank}, ranks[rank].dispatch_args(Way::straight));
        expect(first.args.rows == again.args.rows && first.args.rows != ranks[rank].rows.data(),
               "rows are staged once");
        expect(first.after.size() == 3 && first.before.empty(), "what is staged is copied back");
        for (int peer = 0; peer < kRanks; ++peer)
          expect((first.comm.shifts[1][peer] == 0) == (peer / 2 == process), "other processes see other addresses");
      });
    for (std::thread& thread : threads) thread.join();
  });
  groups[0]->close();
  groups[1].reset();  // after the other's goodbye
}

// A process that ends: the other group fails at once, and says why.
void lost_process() {
  int sockets[2];
  expect(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, sockets) == 0, "a pair of sockets is made");
  std::thread ending([&] { close(sockets[1]); });
  bool lost = false;
  try {
    Group group({{0, -1}}, 20.0, /*poison=*/false, Neighbours{{{0, 1}}, {-1, sockets[0]}});
  } catch (const GroupException& failure) {
    lost = failure.error.kind == "PeerLostError";
  }
  ending.join();
  expect(lost, "a process that ended is a PeerLostError");
}

// A rank that never comes: the others give up within the timeout, and fill their results. Whether all name it.
bool lost_rank_is_named(int tokens, Way way, double timeout_seconds) {
  Group group({{0, 1, 2, 3}}, timeout_seconds, /*poison=*/false);
  std::vector<Rank> ranks(kRanks, Rank{tokens});
  std::mt19937 random(2);
  fill(ranks, random);
  on_all_ranks(group, [&](const Comm& comm, int rank, const Team& team) {
    if (rank != 2) run_kernel<float>(comm, ranks[rank].dispatch_args(way), team);
  });
  const auto error = group.take_error();
  expect(error && error->kind == "PeerTimeoutError", "a lost rank is a PeerTimeoutError");
  expect(std::isnan(ranks[0].received[0]), "results are NaN after a failure");
  bool named = true;
  for (const int rank : {0, 1, 3}) {
    const auto seen = group.reported({0, rank});
    expect(seen.has_value(), "every rank reports the failure");
    named &= seen->message.find("rank 2") != std::string::npos;
  }
  return named;
}

// On a busy machine a rank that did come may be late itself: then with more time.
void lost_rank(int tokens, Way way) {
  double timeout_seconds = 0.2;
  while (!lost_rank_is_named(tokens, way, timeout_seconds)) {
    timeout_seconds *= 2;
    expect(timeout_seconds < 10, "every rank names the lost one");
  }
}

}  // namespace
}  // namespace jax_ep

int main() {
  jax_ep::host_clock();
  jax_ep::round_trips(jax_ep::kMostTokens, 12);
  jax_ep::round_trips(40, 60);  // routed by one team of each rank
  jax_ep::two_processes();
  jax_ep::lost_process();
  jax_ep::recordings_of_running_ops();
  jax_ep::recording_cut_short();
  jax_ep::lost_rank(jax_ep::kMostTokens, jax_ep::Way::straight);
  for (int i = 0; i < 12; ++i)
    jax_ep::lost_rank(
        40, static_cast<jax_ep::Way>(i % jax_ep::kWays));  // some teams wait for the peer, the others for them
  jax_ep::sparse_reductions(20);
  for (int i = 0; i < 3; ++i) jax_ep::lost_sparse_rank();
  jax_ep::matmuls({0, 1, 2, 3}, 12);
  jax_ep::matmuls({0, 1}, 12);
  for (int i = 0; i < 3; ++i) jax_ep::lost_matmul_rank();
  std::puts("protocol: all checks passed");
  return 0;
}
