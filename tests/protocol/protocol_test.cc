// The kernels on bare threads, without XLA: several ranks, several coops a rank, many ops in a row. Built with
// ThreadSanitizer by .ci/run, so that a missing release or acquire is found by a tool and not by luck.
#include "collective_matmul.h"
#include "drops.h"
#include "late.h"
#include "moe.h"
#include "posting.h"
#include "processes.h"
#include "profiles.h"
#include "sparse.h"
#include "told.h"

namespace jax_ep {
namespace {

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
TEST_CASE("dispatch: the last coop to begin stays") { last_to_begin_stays(); }
TEST_CASE("combine: a row out of bounds is not read and is reported by every rank") { rows_out_of_bounds(12); }
TEST_CASE("specs: an op posts what its spec marks") { posts_what_specs_mark(); }

TEST_CASE("errors: all ranks learn of an error at one call") { all_ranks_are_told_at_one_call(); }
TEST_CASE("errors: a rank that gives up waits for nobody who has ended the op") {
  a_rank_that_has_ended_the_op_is_not_awaited();
}
TEST_CASE("errors: the next execution notices a failure by itself") { an_execution_notices_by_itself(); }
TEST_CASE("errors: a report that is read while it is written is whole") { reports_are_whole(200'000); }
TEST_CASE("errors: ranks at different ops are named") {
  for (int i = 0; i < 10; ++i) different_ops(i % 2 == 0);
}
TEST_CASE("errors: peers that gave up between two ops") { given_up_between_ops(); }
TEST_CASE("errors: a failed group ends its later ops at once") { one_grace_for_all_ops(); }
TEST_CASE("lost rank: dispatch ends in time and names it") { lost_rank(kMaxTokens, Way::straight); }
TEST_CASE("lost rank: some coops wait for it and others for them") {
  for (int i = 0; i < 12; ++i) lost_rank(40, static_cast<Way>(i % kWays));
}
TEST_CASE("lost rank: sparse_reduce ends in time") {
  for (int i = 0; i < 3; ++i) lost_sparse_rank();
}
TEST_CASE("lost rank: collective matmuls end in time") {
  for (int i = 0; i < 3; ++i) lost_matmul_rank();
}

TEST_CASE("processes: two map each other's memory") { two_processes(); }
TEST_CASE("processes: one that does not answer") { deaf_process(); }
TEST_CASE("processes: a group of too many ranks is refused and its sockets closed") { refused_group(); }
TEST_CASE("processes: one that ends while a group opens") { lost_process(); }
TEST_CASE("processes: groups that are closed as soon as they are open") { closed_at_once(); }
TEST_CASE("processes: lines of different processes do not disturb each other") { lines_of_different_processes(); }
TEST_CASE("processes: heartbeats tell the slow from the dead") { heartbeats(); }

TEST_CASE("profiles: a device's clock in the host's time") { host_clock(); }
TEST_CASE("profiles: begun and ended while ops run") { profiles_of_running_ops(); }
TEST_CASE("profiles: ended while ranks wait") { profile_cut_short(); }

TEST_CASE("sparse: rows are the sums of all ranks") { sparse_reductions(20); }

TEST_CASE("collective matmuls: of two ranks") { matmuls({0, 1}, 12); }
TEST_CASE("collective matmuls: of four ranks") { matmuls({0, 1, 2, 3}, 12); }
TEST_CASE("collective matmuls: of ten ranks") { matmuls({0, 1, 2, 3, 4, 5, 6, 7, 8, 9}, 1); }

}  // namespace
}  // namespace jax_ep
