// What the checks of the protocol share: ranks on bare threads.
#pragma once

#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <deque>
#include <filesystem>
#include <memory>
#include <thread>
#include <vector>

#include "expect.h"
#include "kernels/kernels.h"
#include "runtime/group.h"

namespace jax_ep {

#ifndef JAX_EP_WAVES  // else waves/comm/platform/cpu.h has these
struct Cta {
  explicit Cta(int) {}
};

inline Coop coop_of(Part cta, Part in_cta, int senders, Cta&) {
  return Coop({cta.index * in_cta.count + in_cta.index, cta.count * in_cta.count},
              sender_part(cta.index, cta.count, in_cta.index, senders),
              receiver_part(cta.index, cta.count, in_cta.index, in_cta.count, senders));
}

template <class Body>
void on_all_lanes(const Coop& coop, Body body) {
  body(coop);
}
#endif

// Every rank as a GPU would run it: each coop on a thread of its own.
constexpr bool kInWaves = Coop::lanes > 1;
constexpr int kRanks = 4, kCtas = kInWaves ? 2 : 1, kCtaCoops = kInWaves ? 2 : 3, kCtaSenders = kCtaCoops - 1;
constexpr int kCoops = kCtas * kCtaCoops;

// Calls body(comm, rank, coop), on each lane.
template <class Body>
void on_all_ranks(const Group& group, Body body) {
  std::vector<std::thread> threads;
  std::deque<Cta> shared;
  for (int rank = 0; rank < group.size(); ++rank)
    for (int cta = 0; cta < kCtas; ++cta) {
      Cta& own = shared.emplace_back(kCtaCoops);
      for (int coop = 0; coop < kCtaCoops; ++coop)
        threads.emplace_back([&, rank, cta, coop] {
          const Coop roles = coop_of({cta, kCtas}, {coop, kCtaCoops}, kCtaSenders, own);
          on_all_lanes(roles, [&](const Coop& lane) { body(group.comm({0, rank}), rank, lane); });
        });
    }
  for (std::thread& thread : threads) thread.join();
}

// An op's kernel, on rows of float32 if it looks at them.
template <class Args>
void run_in_float32(const Comm& comm, const Args& args, const Coop& coop) {
  std::visit([&](const auto& kernel_args) { run_kernel<float>(comm, kernel_args, coop); },
             kernel_of(args, comm.size, kCtas));
}

// The kernels of an op on all ranks but one, whose arguments on a rank are args_of(rank).
template <class ArgsOf>
void run_on_all_ranks(const Group& group, ArgsOf args_of, int absent = -1) {
  on_all_ranks(group, [&](const Comm& comm, int rank, const Coop& coop) {
    if (rank != absent) run_in_float32(comm, args_of(rank), coop);
  });
}

// What would join two processes.
inline std::array<int, 2> socket_pair() {
  std::array<int, 2> sockets{};
  expect(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, sockets.data()) == 0, "a pair of sockets is made");
  return sockets;
}

inline int count_entries(const char* folder) {
  int count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(folder)) ++count;
  return count;
}

// What a failure is called, or nothing.
template <class Body>
std::string kind_of_error(Body body) {
  try {
    body();
  } catch (const GroupException& failure) {
    return name_of(failure.error.kind);
  }
  return "";
}

inline std::shared_ptr<Group> make_group(double timeout_seconds, bool poison) {
  return std::make_shared<Group>(std::vector<std::vector<int>>{{0, 1, 2, 3}}, timeout_seconds, poison);
}

}  // namespace jax_ep
