// What the processes of a group know of each other while they open it, run and leave it.
#pragma once

#include "processes.h"

namespace jax_ep {

// Groups that are closed as soon as they are open: nobody fails a process that is still opening its own.
inline void closed_at_once() {
  for (int i = 0; i < 60; ++i) {
    const std::array<int, 2> sockets = socket_pair();
    in_processes(2, [&](int process) {
      Neighbours neighbours{{{0, 1}}, {-1, -1}};
      neighbours.sockets[1 - process] = sockets[process];
      const std::string error = kind_of_error([&] {
        Group group({process == 0 ? std::vector{0, -1} : std::vector{-1, 1}}, 20.0, /*poison=*/false, neighbours);
        group.close();
      });
      expect(error.empty(), "a group that is closed at once is open before");
    });
  }
}

// Process 0 shares a line with each of the others. Process 1 leaves when its line is open, which the other line, that
// is opened later, is none of its business.
inline void lines_of_different_processes() {
  for (int i = 0; i < 20; ++i) {
    const std::array<int, 2> first = socket_pair(), second = socket_pair();
    const std::vector<std::vector<int>> processes{{0, 1}, {0, 2}};
    const std::vector<std::vector<int>> sockets{{-1, first[0], second[0]}, {first[1], -1, -1}, {second[1], -1, -1}};
    const std::vector<std::vector<std::vector<int>>> lines{
        {{0, -1}, {1, -1}}, {{-1, 0}, {-1, -1}}, {{-1, -1}, {-1, 0}}};
    in_processes(3, [&](int process) {
      if (process == 2) std::this_thread::sleep_for(std::chrono::milliseconds(2));
      const std::string error = kind_of_error([&] {
        Group group(lines[process], 20.0, /*poison=*/false, Neighbours{processes, sockets[process]});
        group.close();
      });
      expect(error.empty(), "a process opens its lines whatever becomes of those that have no part in them");
    });
  }
}

// Who is alive says so, and how far its ranks are; who is not is told from it.
inline void heartbeats() {
  const std::array<int, 2> sockets = socket_pair(), silent = socket_pair();
  const std::vector<std::vector<int>> line{{0, 1, 2}};
  const auto hooks_of = [](int rank_slot, uint64_t epoch) {
    return Sharing::Hooks{kNoHooks.lost, [=] { return Epochs{{rank_slot, epoch}}; }};
  };
  Sharing ahead({line, {-1, sockets[0], silent[0]}}, {0}, 3.2, hooks_of(0, 7));
  Sharing behind({line, {sockets[1], -1, -1}}, {0}, 3.2, hooks_of(1, 4));
  std::string text;
  try {
    ahead.await_heap(2, 2);
  } catch (const GroupException& failure) {
    text = failure.what();
  }
  expect(text == "PeerTimeoutError: process 2 of the group did not share its heap within 3.2 s: no heartbeat for 3 s",
         "the error of a silent process says so");
  expect(ahead.state_of(1) == "it is alive, 3 ops behind", "a slow process is told from a dead one");
  expect(behind.state_of(0) == "it is alive, 0 ops behind", "a process that is ahead is not behind");
  expect(ahead.seconds_silent(1) < 2 && ahead.seconds_silent(2) > 3, "it is known when a process was last heard of");
  const std::vector<PeerState> all = ahead.peer_states();
  expect(all.size() == 2 && all[0].process == 1 && all[1].process == 2, "there is a heartbeat of every other process");
  expect(all[0].epochs == Epochs{{1, 4}} && all[1].epochs.empty(), "it tells the epochs");
  behind.close();
  while (ahead.state_of(1) != "it has left it") std::this_thread::yield();
  close(silent[1]);
}

}  // namespace jax_ep
