// The kernels on bare threads, without XLA: several ranks, several coops a rank, many ops in a row. Built with
// ThreadSanitizer by .ci/run, so that a missing release or acquire is found by a tool and not by luck.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "drops.h"
#include "matmuls.h"
#include "moe.h"
#include "processes.h"
#include "runtime/profiler.h"
#include "sparse.h"

namespace jax_ep {
namespace {

void matmuls(const std::vector<int>& devices, int times) {
  Group group({devices}, 20.0, /*poison=*/true);
  std::mt19937 random(3);
  for (int i = 0; i < times; ++i) {
    const MatmulShape shapes[] = {{100, 17, 24}, {4, 5, 3}, {64, 32, 8}, {20, 300, 16}};
    std::vector<MatmulRank> ranks = draw_matmul_ranks(shapes[i % 4], group.size(), random);
    run_on_all_ranks(group, [&](int rank) { return ranks[rank].reduce_args(false); });
    run_on_all_ranks(group, [&](int rank) { return ranks[rank].reduce_args(true); });
    run_on_all_ranks(group, [&](int rank) { return ranks[rank].gather_args(); });
    check_matmuls(ranks);
  }
  expect(!group.take_error(), "no error is reported");
}

TEST_CASE("lost rank: collective matmuls end in time") {
  for (int i = 0; i < 6; ++i) {
    const bool gather = i % 2;
    Group group({{0, 1, 2, 3}}, 0.2, /*poison=*/false);
    std::vector<MatmulRank> ranks(kRanks, MatmulRank({64, 16, 8}, kRanks));
    if (gather)
      run_on_all_ranks(group, [&](int rank) { return ranks[rank].gather_args(); }, /*absent=*/2);
    else
      run_on_all_ranks(group, [&](int rank) { return ranks[rank].reduce_args(false); }, /*absent=*/2);
    const auto error = group.take_error();
    expect(error && error->kind == ErrorKind::peer_timeout, "a lost rank is a PeerTimeoutError");
    expect(std::isnan(gather ? ranks[0].product[0] : ranks[0].reduced[0]), "results are NaN after a failure");
  }
}

// The host sees it whole, or not at all.
TEST_CASE("errors: a report that is read while it is written is whole") {
  constexpr int kReports = 200'000;
  Group group({{0, 1, 2, 3}}, 20.0, /*poison=*/false);
  const Comm& comm = group.comm({0, 0});
  std::atomic<bool> done{false};
  std::thread rank([&] {
    for (int i = 1; i <= kReports; ++i) {
      Report report{static_cast<uint64_t>(i), Failure::capacity, OpKind::dispatch, 0, 0, 0, i, i};
      if (i % 2)
        report = {
            report.epoch, Failure::invalid, OpKind::combine, 0, 0, static_cast<int64_t>(RoutingLeaf::row_of), -i, -i};
      leave_report(comm.own_signal_pad, comm.report, report);
    }
    done = true;
  });
  for (bool last = false; !last;) {
    last = done;
    const auto error = group.take_error();
    if (!error) continue;
    long long first = 0, second = -1;
    const char* text = std::strpbrk(error->message.c_str(), ":") + std::strlen(": rank 0");
    const bool capacity = error->kind == ErrorKind::capacity;
    const int read =
        capacity ? std::sscanf(text, " needs %lld rows but capacity is %lld", &first, &second)
                 : std::sscanf(text, ": routing.row_of holds %lld, which is out of bounds: it must be below %lld",
                               &first, &second);
    expect(read == 2 && first == second && (first > 0) == capacity, error->message.c_str());
  }
  rank.join();
}

// Peers gave up between two ops of a rank, which may have been stopped meanwhile: its next op says so, once.
TEST_CASE("errors: peers that gave up between two ops") {
  Group group({{0, 1, 2, 3}}, 20.0, /*poison=*/false);
  std::vector<Rank> ranks = draw_ranks(40, 4);
  for (int rank = 0; rank < kRanks; ++rank) store_relaxed(&group.signal_pad({0, rank})->abort, uint64_t{1 + 1});
  dispatch_on_all_ranks(group, ranks, Way::few);
  for (int rank = 0; rank < kRanks; ++rank) {
    expect(std::isnan(ranks[rank].rows[0]), "nothing is delivered");
    const auto seen = group.reported({0, rank});
    expect(seen && seen->kind == ErrorKind::peer_lost, "every rank tells the host");
  }
  dispatch_on_all_ranks(group, ranks, Way::few);
  for (int rank = 0; rank < kRanks; ++rank)
    expect(group.comm({0, rank}).report->epoch == 1, "the first op that failed has the word");
}

// A rank is absent. The others wait for it until the timeout, and a grace for it to stop writing, once: not in each op
// that follows.
TEST_CASE("errors: a failed group ends its later ops at once") {
  Group group({{0, 1, 2, 3}}, 0.2, /*poison=*/false);
  std::vector<Rank> ranks = draw_ranks(40, 5);
  const auto began = std::chrono::steady_clock::now();
  for (int op = 0; op < 60; ++op) dispatch_on_all_ranks(group, ranks, Way::few, /*absent=*/3);
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
  expect(took.count() < 5.0, "a failed group ends its ops at once");  // 60 graces are 6 s, and the threads take 2.5 s
  expect(std::isnan(ranks[0].rows[0]), "nothing is delivered");
}

TEST_CASE("errors: all ranks learn of an error at one call") {
  const std::shared_ptr<Group> group = make_group(20.0, /*poison=*/false);
  std::vector<Rank> ranks = draw_ranks(40, 5);
  const auto told = [&](int rank) {
    const auto error = group->error_before({0, rank});
    expect(!error || error->kind == ErrorKind::invalid_routing, "it is the error of the op");
    return error.has_value();
  };
  for (int rank = 0; rank < kRanks; ++rank) expect(!told(rank), "nothing has happened");
  expect(!told(0), "the first to ask decides for all");
  combine_out_of_bounds(*group, ranks, 0);
  expect(told(0), "the next call is told");
  expect(!told(0), "once");
  for (int rank = 1; rank < kRanks; ++rank) {
    expect(!told(rank), "a call that another rank has gone on with");
    expect(told(rank), "the call at which another rank was told");
    expect(!told(rank), "once");
  }
  expect(group->take_error().has_value(), "check() raises it, too");
  combine_out_of_bounds(*group, ranks, 0);
  expect(group->take_error().has_value(), "an error of a later op");
  for (int rank = 0; rank < kRanks; ++rank) expect(!told(rank), "who has checked goes on");
}

// Nobody else looks for the report of a lost rank.
TEST_CASE("errors: the next execution notices a failure by itself") {
  Group group({{0, 1, 2, 3}}, 0.2, /*poison=*/false);
  std::vector<Rank> ranks = draw_ranks(40, 6);
  dispatch_on_all_ranks(group, ranks, Way::straight, /*absent=*/2);
  expect(!group.failure(), "nobody has looked");
  for (const int rank : {0, 1, 2, 3}) {
    const auto error = group.error_before({0, rank});
    expect(error && error->kind == ErrorKind::peer_timeout, "every rank is told");
  }
}

struct NoResults {
  template <class Each>
  void each(Each) const {}
};

// A rank whose host saw a failure launches nothing any more, and so acknowledges nothing.
TEST_CASE("errors: a rank that gives up waits for nobody who has ended the op") {
  const std::shared_ptr<Group> group = make_group(20.0, /*poison=*/false);
  std::atomic<uint64_t> took = 0;
  on_all_ranks(*group, [&](const Comm& comm, int rank, const Coop& coop) {
    Op op(comm, coop, OpKind::dispatch);
    op.post({});
    op.wait_posted();
    uint64_t began = 0;
    if (rank == 0) {
      for (int peer = 1; peer < kRanks; ++peer)
        spin_until(&comm.signal_pads[peer]->epoch, op.epoch, &op.signal_pad->never, 20'000'000'000);
      if (coop.index == 0) store_release(&op.signal_pad->abort, uint64_t{2});  // rank 1 is lost
      began = clock_ns();
      op.wait_delivered(0);
      expect(!op.ok(), "the op has failed");
    }
    op.finish(NoResults{});
    if (rank == 0 && coop.lane == 0) took = std::max<uint64_t>(took, clock_ns() - began);
  });
  expect(took < kBegunGraceNs / 2, "a rank that gives up waits for nobody who has ended the op");
}

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
void late_senders(int tokens, int late) {
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
TEST_CASE("dispatch: the last coop to begin stays") {
  uint64_t begun = 0;
  const Coop alone;
  for (int i = 0; i < 3; ++i) expect(!all_begin(alone, &begun, 4), "who comes before the last leaves");
  expect(all_begin(alone, &begun, 4), "the last to begin stays");
}

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

TEST_CASE("specs: an op posts what its spec marks") {
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

// A device's clock that is 5000 ahead of the host's, and gains 100 in a profile of 1000, or loses as much.
TEST_CASE("profiles: a device's clock in the host's time") {
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
void check_profiles(const std::vector<RankProfile>& profiles, uint64_t ops) {
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
TEST_CASE("profiles: begun and ended while ops run") {
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
TEST_CASE("profiles: ended while ranks wait") {
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

uint64_t product_word;  // of every device
std::vector<uint64_t*> product_words(int) { return {&product_word}; }

// What a CTA of a product records (gemm/kernel.h).
void multiply_tiles(int cta, int tiles) {
  const auto* const timeline = reinterpret_cast<const Timeline*>(product_word);
  if (!timeline || static_cast<uint64_t>(cta) >= timeline->ctas) return;
  for (int tile = 0; tile <= tiles; ++tile) append(&timeline->tracks[cta], 100 + cta, OpKind{}, Phase::multiply);
  append(&timeline->tracks[cta], 100 + cta, OpKind{}, Phase::none);
}

// The first group of a device shows its products, from its start to its stop.
TEST_CASE("profiles: products") {
  constexpr int kCtas = 3;
  const auto make_profiler = [&] {
    auto group = std::make_shared<Group>(std::vector<std::vector<int>>{{0}}, 20.0, /*poison=*/false);
    return Profiler(std::move(group), kCoops, {kCtas, &product_words});
  };
  Profiler first = make_profiler(), second = make_profiler();
  for (int profile = 0; profile < 2; ++profile) {
    multiply_tiles(0, 1);
    first.start();
    second.start();
    for (int cta = 0; cta <= kCtas; ++cta) multiply_tiles(cta, 2 * cta);  // the first has no tile, the last no track
    const RankProfile found = first.stop()[0];
    expect(second.stop()[0].spans.empty(), "another group has no products");
    expect(found.unfinished == 0 && found.lost == 0 && found.spans.size() == 2 + 4, "every tile has a span");
    for (const Span& span : found.spans)
      expect(span.role == kProductRole && span.epoch == 100 + static_cast<uint64_t>(span.cta) &&
                 span.phase == Phase::multiply && span.begin_ns <= span.end_ns,
             "it is that of its CTA");
    expect(product_word == 0, "no product is recorded afterwards");
  }
  make_profiler().start();
  expect(product_word == 0, "nor when a profile is left");
}

// dispatch and combine, in a profile.
void round_trips(int tokens, int times) {
  const std::shared_ptr<Group> shared = make_group(20.0, /*poison=*/true);
  Group& group = *shared;
  Profiler profiler(shared, kCoops);
  profiler.start();
  std::vector<Rank> ranks(kRanks, Rank{tokens});
  std::mt19937 random(1);
  for (int i = 0; i < times; ++i) round_trip(group, ranks, static_cast<Way>(i % kWays), random);
  expect(!group.take_error(), "no error is reported");
  check_profiles(profiler.stop(), 2 * times);
}

TEST_CASE("dispatch: combine of its rows gives each token times its weights") { round_trips(kMaxTokens, 12); }
TEST_CASE("dispatch: the same where one coop routes") { round_trips(40, 60); }
TEST_CASE("dispatch: dropped rows are shared out fairly where one coop routes") {
  drops(40, {Way::straight, Way::float8, Way::few, Way::few_float8});
}
TEST_CASE("dispatch: dropped rows are shared out fairly") { drops(kMaxTokens, {Way::straight, Way::float8}); }
TEST_CASE("dispatch: coops that begin when all others have ended") {
  for (const int tokens : {0, 1, 2, 40, kMaxTokens})
    for (int late = 1; late < kCoops; ++late) late_senders(tokens, late);  // the first begins first
}
TEST_CASE("combine: a row out of bounds is not read and is reported by every rank") { rows_out_of_bounds(12); }

TEST_CASE("errors: ranks at different ops are named") {
  for (int i = 0; i < 10; ++i) different_ops(i % 2 == 0);
}
TEST_CASE("lost rank: dispatch ends in time and names it") { lost_rank(kMaxTokens, Way::straight); }
TEST_CASE("lost rank: some coops wait for it and others for them") {
  for (int i = 0; i < 12; ++i) lost_rank(40, static_cast<Way>(i % kWays));
}
TEST_CASE("lost rank: sparse_reduce ends in time") {
  for (int i = 0; i < 3; ++i) lost_sparse_rank();
}

TEST_CASE("sparse: rows are the sums of all ranks") { sparse_reductions(20); }

TEST_CASE("collective matmuls: of two ranks") { matmuls({0, 1}, 12); }
TEST_CASE("collective matmuls: of four ranks") { matmuls({0, 1, 2, 3}, 12); }
TEST_CASE("collective matmuls: of ten ranks") { matmuls({0, 1, 2, 3, 4, 5, 6, 7, 8, 9}, 1); }

}  // namespace
}  // namespace jax_ep
