// Groups whose ranks are of two processes: what they map of each other, and what they see of each other's end.
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

const Sharing::Hooks kNoHooks{[](int, const std::string&) {}, [] { return Epochs{}; }};

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
    Neighbours neighbours{{{0, 0, 1, 1}}, {-1, -1}};
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
    Sharing sharing({{{0, 1}}, {-1, sockets[0]}}, {0}, 0.2, kNoHooks);
    auto telling = std::async(std::launch::async, [&] { return kind_of_error([&] { sharing.share(*region, {1}); }); });
    expect(
        kind_of_error([&] { sharing.await_heap(1, 1); }) == "PeerTimeoutError" && telling.get() == "PeerTimeoutError",
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
                Neighbours{{std::vector<int>(kMaxRanks + 1)}, {-1, sockets[0]}});
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
    Group group({{0, -1}}, 20.0, /*poison=*/false, Neighbours{{{0, 1}}, {-1, sockets[0]}});
  } catch (const GroupException& failure) {
    lost = failure.error.kind == ErrorKind::peer_lost;
  }
  ending.join();
  expect(lost, "a process that ended is a PeerLostError");
}

}  // namespace jax_ep
