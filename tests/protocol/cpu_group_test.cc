// A group on the CPU, without XLA: ranks that fail alone, and ranks that are parked when they do.
#include "runtime/cpu/cpu_group.h"

#include <future>
#include <stdexcept>

#include "expect.h"
#include "kernels/kernels.h"

namespace jax_ep {
namespace {

constexpr int kRanks = 4, kLost = 2;
constexpr double kTimeoutSeconds = 20;
constexpr auto kSoon = std::chrono::seconds(10);  // before the timeout

using Outcome = std::promise<std::optional<GroupError>>;

// What becomes of an arrival, that must be known soon.
std::optional<GroupError> outcome_of(Outcome& outcome) {
  std::future<std::optional<GroupError>> future = outcome.get_future();
  expect(future.wait_for(kSoon) == std::future_status::ready, "nobody waits for the timeout");
  return future.get();
}

std::unique_ptr<CpuGroup> make_group(std::vector<int> ranks = {0, 1, 2, 3}, double timeout_seconds = kTimeoutSeconds) {
  const std::vector<std::vector<int>> lines{std::move(ranks)};
  return std::make_unique<CpuGroup>(lines, timeout_seconds, /*poison=*/false);
}

void arrive(CpuGroup& group, const int& site, int rank, Task task, Outcome& outcome, const Arriving& what = {}) {
  group.arrive(&site, 1, what, {0, rank}, std::move(task),
               [&outcome](std::optional<GroupError> error) { outcome.set_value(std::move(error)); });
}

// An exchange of nothing, which waits for all ranks.
void exchange(const Comm& comm) {
  const std::vector<int32_t> none(kRanks);
  RaggedArgs args{};
  args.slices = 1, args.row_bytes = 4;
  args.input_offsets = args.send_sizes = args.output_offsets = args.recv_sizes = none.data();
  run_kernel(comm, args, Coop{});
}

// A rank that cannot run its op: all learn why, and at once.
TEST_CASE("a rank that cannot run its op fails it for all ranks") {
  const auto group = make_group();
  const int site = 0;
  Outcome outcomes[kRanks];
  for (int rank = 0; rank < kRanks; ++rank) {
    const auto run = [&group, rank] {
      if (rank == kLost) throw std::runtime_error("no memory");
      exchange(group->comm({0, rank}));
    };
    arrive(*group, site, rank, run, outcomes[rank]);
  }
  for (Outcome& outcome : outcomes) expect(outcome_of(outcome).has_value(), "an op that a rank cannot run fails");
  expect(group->take_error()->message == "no memory", "the group knows the reason");
}

// The last arrivals at that op keep the watching thread busy.
TEST_CASE("a parked rank learns that another op failed") {
  for (int i = 0; i < 100; ++i) {
    const auto group = make_group();
    const int parking = 0, site = 0;
    Outcome parked, outcomes[kRanks];
    arrive(*group, parking, 0, [] {}, parked);
    for (int rank = 0; rank < kRanks; ++rank)
      arrive(*group, site, rank, [] { throw std::runtime_error("no memory"); }, outcomes[rank]);
    expect(outcome_of(parked)->message == "no memory", "who is parked learns of a failure");
    for (Outcome& outcome : outcomes) outcome_of(outcome);
  }
}

// A rank is parked when the group fails elsewhere, as it does when a process is lost; then others arrive.
TEST_CASE("a parked rank learns that the group failed") {
  const auto group = make_group();
  const int site = 0;
  Outcome parked, late;
  arrive(*group, site, 0, [] {}, parked);
  group->fail({ErrorKind::peer_lost, "gone"});
  arrive(*group, site, 1, [] {}, late);
  expect(outcome_of(late)->message == "gone" && outcome_of(parked)->message == "gone", "all learn of a failure");
}

// A rank fails while another still writes: results come when nobody can write into them any more, and with them the
// error.
TEST_CASE("results of a failed op wait for ranks that still write") {
  const auto group = make_group();
  const int site = 0;
  Outcome outcomes[kRanks];
  std::atomic<bool> writing = true;
  for (int rank = 0; rank < kRanks; ++rank)
    group->arrive(
        &site, 1, {}, {0, rank},
        [&writing, rank] {
          if (rank != kLost) throw std::runtime_error("no memory");
          std::this_thread::sleep_for(std::chrono::milliseconds(500));
          writing = false;
        },
        [&, rank](std::optional<GroupError> error) {
          expect(!writing, "no result of a failed op is handed out while a rank is in it");
          outcomes[rank].set_value(std::move(error));
        });
  for (Outcome& outcome : outcomes) expect(outcome_of(outcome).has_value(), "all ranks learn of the failure");
}

// Ranks of one line that stand at different calls until the timeout are told so.
TEST_CASE("ranks that stand at different calls are told so") {
  const auto group = make_group({0, 1}, 0.2);
  const int here = 0, there = 0;
  Outcome outcomes[2];
  const auto signature = [](OpKind op, int64_t tokens) { return Signature{op, {}, {}, 0, {tokens}, {}}; };
  arrive(*group, here, 0, [] {}, outcomes[0], {signature(OpKind::dispatch, 64), 0});
  arrive(*group, there, 1, [] {}, outcomes[1], {signature(OpKind::combine, 32), 0});
  for (Outcome& outcome : outcomes) {
    const auto error = outcome_of(outcome);
    expect(error && error->kind == ErrorKind::mismatch, "nobody is late");
    for (const char* part : {"dispatch float32 T=64", "combine float32 T=32", "rank 1 waits in"})
      expect(error->message.find(part) != std::string::npos, part);
  }
}

}  // namespace
}  // namespace jax_ep
