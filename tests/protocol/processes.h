// Groups whose ranks are of several processes: what they map of each other, and what they know of each other while they
// open a group, run and leave it.
#pragma once

#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <future>

#include "moe.h"
#include "runtime/reach.h"

namespace jax_ep {

// What would join two processes.
inline std::array<int, 2> socket_pair() {
  std::array<int, 2> sockets{};
  expect(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, sockets.data()) == 0, "a pair of sockets is made");
  return sockets;
}

inline void ignore_loss(int, const std::string&) {}

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

// Runs the body as each of so many processes.
template <class Body>
void in_processes(int count, Body body) {
  std::vector<std::thread> others;
  for (int process = 1; process < count; ++process) others.emplace_back([&, process] { body(process); });
  body(0);
  for (std::thread& other : others) other.join();
}

// Two groups as two processes would have them, joined by a socket. What they map is not touched here: the tool does not
// see that both addresses are of one memory, nor that a socket orders them.
inline void two_processes() {
  const std::array<int, 2> sockets = socket_pair();
  std::unique_ptr<Group> groups[2];
  in_processes(2, [&](int process) {
    Neighbours neighbours{{{0, 0, 1, 1}}, {-1, -1}, 20.0};
    neighbours.sockets[1 - process] = sockets[process];
    std::vector<std::vector<int>> lines{process == 0 ? std::vector{0, 1, -1, -1} : std::vector{-1, -1, 2, 3}};
    groups[process] = std::make_unique<Group>(lines, 20.0, /*poison=*/false, neighbours);
  });
  std::vector<Rank> ranks(kRanks, Rank{40});
  in_processes(2, [&](int process) {
    std::vector<std::thread> threads;
    for (int rank = 2 * process; rank < 2 * process + 2; ++rank)
      threads.emplace_back([&, rank] {
        const auto first = reach(*groups[process], {0, rank}, ranks[rank].dispatch_args(Way::straight));
        const auto again = reach(*groups[process], {0, rank}, ranks[rank].dispatch_args(Way::straight));
        expect(first.args.row_of == again.args.row_of && first.args.row_of != ranks[rank].row_of.data(),
               "rows are staged once");
        expect(first.after.size() == 3 && first.before.empty(), "what is staged is copied back");
        for (int peer = 0; peer < kRanks; ++peer)
          expect((first.comm.peer_offsets[1][peer] == 0) == (peer / 2 == process),
                 "other processes see other addresses");
      });
    for (std::thread& thread : threads) thread.join();
  });
  groups[0]->close();
  groups[1].reset();  // after the other's goodbye
}

// A process that reads nothing any more: what this one tells it holds up only who tells it.
inline void deaf_process() {
  const std::array<int, 2> sockets = socket_pair();
  const Note note{};
  while (send(sockets[0], &note, sizeof(note), MSG_DONTWAIT) > 0) {
  }
  const auto region = allocate_region(0, 4096, {0});
  const auto start = std::chrono::steady_clock::now();
  {
    Sharing sharing({{{0, 1}}, {-1, sockets[0]}, 0.2}, {0}, ignore_loss);
    auto telling = std::async(std::launch::async, [&] { return kind_of_error([&] { sharing.share(*region, {1}); }); });
    expect(kind_of_error([&] { sharing.await_signal_pad(1, 1); }) == "PeerTimeoutError" &&
               telling.get() == "PeerTimeoutError",
           "a silent process is a PeerTimeoutError");
  }
  expect(std::chrono::steady_clock::now() - start < std::chrono::seconds(10), "a deaf process holds up nobody");
  close(sockets[1]);
}

// What a group does not accept it has taken over all the same.
inline void refused_group() {
  const std::array<int, 2> sockets = socket_pair();
  bool refused = false;
  try {
    Group group({std::vector<int>(kMaxRanks + 1)}, 20.0, /*poison=*/false,
                Neighbours{{std::vector<int>(kMaxRanks + 1)}, {-1, sockets[0]}, 20.0});
  } catch (const std::invalid_argument&) {
    refused = true;
  }
  expect(refused, "a group has so many ranks");
  while (send(sockets[1], "", 1, MSG_DONTWAIT | MSG_NOSIGNAL) > 0) {
  }
  expect(errno == EPIPE, "its sockets are closed");
  close(sockets[1]);
}

// A process that ends: the other group fails at once, and says why.
inline void lost_process() {
  const std::array<int, 2> sockets = socket_pair();
  std::thread ending([&] { close(sockets[1]); });
  bool lost = false;
  try {
    Group group({{0, -1}}, 20.0, /*poison=*/false, Neighbours{{{0, 1}}, {-1, sockets[0]}, 20.0});
  } catch (const GroupException& failure) {
    lost = failure.error.kind == ErrorKind::peer_lost;
  }
  ending.join();
  expect(lost, "a process that ended is a PeerLostError");
}

// Groups that are closed as soon as they are open: nobody fails a process that is still opening its own.
inline void closed_at_once() {
  for (int i = 0; i < 60; ++i) {
    const std::array<int, 2> sockets = socket_pair();
    in_processes(2, [&](int process) {
      Neighbours neighbours{{{0, 1}}, {-1, -1}, 20.0};
      neighbours.sockets[1 - process] = sockets[process];
      const std::string error = kind_of_error([&] {
        Group group({process == 0 ? std::vector{0, -1} : std::vector{-1, 1}}, 20.0, /*poison=*/false, neighbours);
        group.close();
      });
      expect(error.empty(), "a group that is closed at once is open before");
    });
  }
}

// A group waits by its open timeout for a process that creates its part late, whatever the timeout of its ops.
inline void late_process() {
  const std::array<int, 2> sockets = socket_pair();
  in_processes(2, [&](int process) {
    if (process == 1) std::this_thread::sleep_for(std::chrono::milliseconds(300));
    Neighbours neighbours{{{0, 1}}, {-1, -1}, 20.0};
    neighbours.sockets[1 - process] = sockets[process];
    const std::string error = kind_of_error([&] {
      Group group({process == 0 ? std::vector{0, -1} : std::vector{-1, 1}}, 0.05, /*poison=*/false, neighbours);
    });
    expect(error.empty(), "the timeout of ops does not end the opening of a group");
  });
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
        Group group(lines[process], 20.0, /*poison=*/false, Neighbours{processes, sockets[process], 20.0});
        group.close();
      });
      expect(error.empty(), "a process opens its lines whatever becomes of those that have no part in them");
    });
  }
}

// Who is alive is told from who has closed its group.
inline void states_of_processes() {
  const std::array<int, 2> sockets = socket_pair();
  Sharing here({{{0, 1}}, {-1, sockets[0]}, 0.2}, {0}, ignore_loss);
  Sharing there({{{0, 1}}, {sockets[1], -1}, 0.2}, {0}, ignore_loss);
  std::string text;
  try {
    here.await_signal_pad(1, 1);
  } catch (const GroupException& failure) {
    text = failure.what();
  }
  expect(text == "PeerTimeoutError: process 1 did not share its signal pad within 0.2 s: it is alive",
         "the error of a silent process says so");
  there.close();
  while (here.state_of(1) != "it has closed the group") std::this_thread::yield();
}

}  // namespace jax_ep
