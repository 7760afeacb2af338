// What the checks of the protocol share: ranks on bare threads.
#pragma once

#include <memory>
#include <thread>
#include <vector>

#include "expect.h"
#include "kernels/kernels.h"
#include "runtime/group.h"

namespace jax_ep {

constexpr int kRanks = 4, kTeams = 3, kPushers = 2;

// Every rank on kTeams threads of its own, as a GPU would run it.
template <class Body>
void on_all_ranks(const Group& group, Body body) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < group.size(); ++rank)
    for (int team = 0; team < kTeams; ++team)
      threads.emplace_back([&, rank, team] {
        const Team roles({team, kTeams}, pusher_place(0, 1, team, kPushers),
                         filler_place(0, 1, team, kTeams, kPushers));
        body(group.comm({0, rank}), rank, roles);
      });
  for (std::thread& thread : threads) thread.join();
}

inline std::shared_ptr<Group> make_group(double timeout_seconds, bool poison) {
  return std::make_shared<Group>(std::vector<std::vector<int>>{{0, 1, 2, 3}}, timeout_seconds, poison);
}

}  // namespace jax_ep
