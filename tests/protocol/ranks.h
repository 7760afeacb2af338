// What the checks of the protocol share: ranks on bare threads.
#pragma once

#include <memory>
#include <thread>
#include <vector>

#include "expect.h"
#include "kernels/kernels.h"
#include "runtime/group.h"

namespace jax_ep {

constexpr int kRanks = 4, kCoops = 3, kSenders = 2;

// Every rank on kCoops threads of its own, as a GPU would run it.
template <class Body>
void on_all_ranks(const Group& group, Body body) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < group.size(); ++rank)
    for (int coop = 0; coop < kCoops; ++coop)
      threads.emplace_back([&, rank, coop] {
        const Coop roles({coop, kCoops}, sender_part(0, 1, coop, kSenders),
                         receiver_part(0, 1, coop, kCoops, kSenders));
        body(group.comm({0, rank}), rank, roles);
      });
  for (std::thread& thread : threads) thread.join();
}

// An op's kernel, on rows of float32 if it looks at them.
template <class Args>
void run_in_float32(const Comm& comm, const Args& args, const Coop& coop) {
  std::visit([&](const auto& chosen) { run_kernel<float>(comm, chosen, coop); }, kernel_of(args));
}

inline std::shared_ptr<Group> make_group(double timeout_seconds, bool poison) {
  return std::make_shared<Group>(std::vector<std::vector<int>>{{0, 1, 2, 3}}, timeout_seconds, poison);
}

}  // namespace jax_ep
