// Groups whose ranks are of several processes: what they map of each other, and what they know of each other while they
// open a group, run and leave it.
#pragma once

#include <cerrno>
#include <chrono>
#include <future>

#include "moe.h"
#include "runtime/reach.h"

namespace jax_ep {

// Runs the body as each of so many processes.
template <class Body>
void in_processes(int count, Body body) {
  std::vector<std::thread> others;
  for (int process = 1; process < count; ++process) others.emplace_back([&, process] { body(process); });
  body(0);
  for (std::thread& other : others) other.join();
}

// What process 0 or 1 has of a group of one line, whose ranks are of these processes.
inline std::unique_ptr<Group> open_part(int process, const std::array<int, 2>& sockets, const std::vector<int>& owners,
                                        double timeout_seconds = 20.0) {
  std::vector<std::vector<int>> lines(1);
  for (std::size_t rank = 0; rank < owners.size(); ++rank)
    lines[0].push_back(owners[rank] == process ? static_cast<int>(rank) : -1);
  Neighbours neighbours{{owners}, {-1, -1}, 20.0};
  neighbours.sockets[1 - process] = sockets[process];
  return std::make_unique<Group>(lines, timeout_seconds, /*poison=*/false, neighbours);
}

// Two groups as two processes would have them, joined by a socket. What they map is not touched here: the tool does not
// see that both addresses are of one memory, nor that a socket orders them.
TEST_CASE("processes: two map each other's memory") {
  const std::array<int, 2> sockets = socket_pair();
  std::unique_ptr<Group> groups[2];
  in_processes(2, [&](int process) { groups[process] = open_part(process, sockets, {0, 0, 1, 1}); });
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
TEST_CASE("processes: one that does not answer") {
  const std::array<int, 2> sockets = socket_pair();
  const Note note{};
  while (send(sockets[0], &note, sizeof(note), MSG_DONTWAIT) > 0) {
  }
  const auto region = allocate_region(0, 4096, {0});
  const auto start = std::chrono::steady_clock::now();
  {
    Sharing sharing({{{0, 1}}, {-1, sockets[0]}, 0.2}, {0}, [](int, const std::string&) {});
    auto telling = std::async(std::launch::async, [&] { return kind_of_error([&] { sharing.share(*region, {1}); }); });
    expect(kind_of_error([&] { sharing.await_signal_pad(1, 1); }) == "PeerTimeoutError" &&
               telling.get() == "PeerTimeoutError",
           "a silent process is a PeerTimeoutError");
  }
  expect(std::chrono::steady_clock::now() - start < std::chrono::seconds(10), "a deaf process holds up nobody");
  close(sockets[1]);
}

// What a group does not accept it has taken over all the same.
TEST_CASE("processes: a group of too many ranks is refused and its sockets closed") {
  const std::array<int, 2> sockets = socket_pair();
  REQUIRE_THROWS_AS(open_part(0, sockets, std::vector<int>(kMaxRanks + 1)), std::invalid_argument);
  while (send(sockets[1], "", 1, MSG_DONTWAIT | MSG_NOSIGNAL) > 0) {
  }
  expect(errno == EPIPE, "its sockets are closed");
  close(sockets[1]);
}

// The other group fails at once, and says why.
TEST_CASE("processes: one that ends while a group opens") {
  const std::array<int, 2> sockets = socket_pair();
  std::thread ending([&] { close(sockets[1]); });
  const std::string error = kind_of_error([&] { open_part(0, sockets, {0, 1}); });
  ending.join();
  expect(error == "PeerLostError", "a process that ended is a PeerLostError");
}

// Nobody fails a process that is still opening its own.
TEST_CASE("processes: groups that are closed as soon as they are open") {
  for (int i = 0; i < 60; ++i) {
    const std::array<int, 2> sockets = socket_pair();
    in_processes(2, [&](int process) {
      const std::string error = kind_of_error([&] { open_part(process, sockets, {0, 1})->close(); });
      expect(error.empty(), "a group that is closed at once is open before");
    });
  }
}

// A group waits by its open timeout for a process that creates its part late, whatever the timeout of its ops.
TEST_CASE("processes: one that opens its part late") {
  const std::array<int, 2> sockets = socket_pair();
  in_processes(2, [&](int process) {
    if (process == 1) std::this_thread::sleep_for(std::chrono::milliseconds(300));
    const std::string error = kind_of_error([&] { open_part(process, sockets, {0, 1}, 0.05); });
    expect(error.empty(), "the timeout of ops does not end the opening of a group");
  });
}

// Process 0 shares a line with each of the others. Process 1 leaves when its line is open, which the other line, that
// is opened later, is none of its business.
TEST_CASE("processes: lines of different processes do not disturb each other") {
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

TEST_CASE("processes: one that is alive is told from one that has closed its group") {
  const std::array<int, 2> sockets = socket_pair();
  const auto ignore = [](int, const std::string&) {};
  Sharing here({{{0, 1}}, {-1, sockets[0]}, 0.2}, {0}, ignore);
  Sharing there({{{0, 1}}, {sockets[1], -1}, 0.2}, {0}, ignore);
  CHECK_THROWS_WITH(here.await_signal_pad(1, 1),
                    "PeerTimeoutError: process 1 did not share its signal pad within 0.2 s: it is alive");
  there.close();
  while (here.state_of(1) != "it has closed the group") std::this_thread::yield();
}

}  // namespace jax_ep
