// What a program's next execution is told of an earlier one: by its calls, which every rank asks about in one order.
#pragma once

#include <algorithm>
#include <atomic>
#include <string>

#include "moe.h"

namespace jax_ep {

inline void all_ranks_are_told_at_one_call() {
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
inline void an_execution_notices_by_itself() {
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
inline void a_rank_that_has_ended_the_op_is_not_awaited() {
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

}  // namespace jax_ep
