// The kernels on bare threads, without XLA: several ranks, several coops a rank, many ops in a row. Built with
// ThreadSanitizer by .ci/run, so that a missing release or acquire is found by a tool and not by luck.
#include "drops.h"
#include "late.h"
#include "matmul.h"
#include "moe.h"
#include "posting.h"
#include "processes_ending.h"
#include "recordings.h"
#include "sparse.h"
#include "told.h"

namespace jax_ep {
namespace {

// dispatch and combine, recorded.
void round_trips(int tokens, int times) {
  const std::shared_ptr<Group> shared = make_group(20.0, /*poison=*/true);
  Group& group = *shared;
  Recorder recorder(shared, kCoops);
  recorder.start();
  std::vector<Rank> ranks(kRanks, Rank{tokens});
  std::mt19937 random(1);
  for (int i = 0; i < times; ++i) {
    const Way way = static_cast<Way>(i % kWays);
    fill(ranks, random);
    on_all_ranks(group, [&](const Comm& comm, int rank, const Coop& coop) {
      run_in_float32(comm, ranks[rank].dispatch_args(way), coop);
    });
    check_counts(ranks);
    on_all_ranks(group, [&](const Comm& comm, int rank, const Coop& coop) {
      run_in_float32(comm, ranks[rank].combine_args(), coop);
    });
    check_round_trip(ranks, way == Way::float8 || way == Way::few_float8 ? 0.2f : 1e-5f);
  }
  expect(!group.take_error(), "no error is reported");
  check_recordings(recorder.stop(), 2 * times);
}

}  // namespace
}  // namespace jax_ep

int main() {
  jax_ep::host_clock();
  jax_ep::round_trips(jax_ep::kMostTokens, 12);
  jax_ep::round_trips(40, 60);  // routed by one coop of each rank
  using jax_ep::Way;
  jax_ep::drops(40, {Way::straight, Way::float8, Way::few, Way::few_float8});
  jax_ep::drops(jax_ep::kMostTokens, {Way::straight, Way::float8});
  jax_ep::posts_what_specs_mark();
  jax_ep::rows_out_of_bounds(12);
  jax_ep::all_ranks_are_told_at_one_call();
  jax_ep::an_execution_notices_by_itself();
  for (const int tokens : {0, 1, 2, 40, jax_ep::kMostTokens})
    for (int late = 1; late < jax_ep::kCoops; ++late) jax_ep::late_senders(tokens, late);  // the first begins first
  jax_ep::last_to_begin_stays();
  jax_ep::two_processes();
  jax_ep::deaf_process();
  jax_ep::refused_group();
  jax_ep::lost_process();
  jax_ep::closed_at_once();
  jax_ep::lines_of_different_processes();
  jax_ep::heartbeats();
  jax_ep::recordings_of_running_ops();
  jax_ep::recording_cut_short();
  jax_ep::lost_rank(jax_ep::kMostTokens, jax_ep::Way::straight);
  for (int i = 0; i < 12; ++i)
    jax_ep::lost_rank(
        40, static_cast<jax_ep::Way>(i % jax_ep::kWays));  // some coops wait for the peer, the others for them
  for (int i = 0; i < 10; ++i) jax_ep::different_ops(i % 2 == 0);
  jax_ep::given_up_between_ops();
  jax_ep::one_grace_for_all_ops();
  jax_ep::reports_are_whole(200'000);
  jax_ep::sparse_reductions(20);
  for (int i = 0; i < 3; ++i) jax_ep::lost_sparse_rank();
  jax_ep::matmuls({0, 1, 2, 3}, 12);
  jax_ep::matmuls({0, 1}, 12);
  jax_ep::matmuls({0, 1, 2, 3, 4, 5, 6, 7, 8, 9}, 1);
  for (int i = 0; i < 3; ++i) jax_ep::lost_matmul_rank();
  std::puts("protocol: all checks passed");
  return 0;
}
