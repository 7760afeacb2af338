// How the processes of a group share memory: each process maps the regions of the others, and answers with the address.
// A thread answers requests, so that no process waits for another's Python. Every second the thread also sends a
// heartbeat.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "runtime/error.h"
#include "runtime/note.h"
#include "runtime/outbox.h"
#include "runtime/posix.h"
#include "runtime/region.h"

namespace jax_ep {

// The processes of a group's ranks, on one host. Empty for a group of one process.
struct Neighbours {
  std::vector<std::vector<int>> processes;  // by line and rank
  std::vector<int> sockets;                 // by process, connected, in message mode; -1 where there is none
  double open_timeout;                      // seconds that creating the group waits for one of them
};

// Ops that ranks have finished, by rank index: line * size + rank.
using Epochs = std::map<int, uint64_t>;

// When another process was last heard of, and how many ops its ranks had finished then.
class LastSeen {
 public:
  static constexpr auto kPeriod = std::chrono::seconds(1);  // of a process that is alive
  static constexpr double kSilentSeconds = 2.5;             // after more than two lost heartbeats

  void beat() { heard_ = Clock::now(); }
  void note(int rank_index, uint64_t epoch) { epochs_[rank_index] = epoch; }

  double seconds_silent() const { return std::chrono::duration<double>(Clock::now() - heard_).count(); }

  // Says whether the process is slow or dead. `ours`: the epochs of this process. Ranks of one line run the same ops,
  // so the difference of their epochs is the number of ops that the process is behind. `size`: the ranks of a line.
  std::string describe(const Epochs& ours, int size) const {
    const double silent = seconds_silent();
    if (silent > kSilentSeconds) return "no heartbeat for " + std::to_string(static_cast<int64_t>(silent)) + " s";
    if (epochs_.empty() || ours.empty()) return "it is alive";
    int64_t behind = 0;
    for (const auto& [their_index, their_epoch] : epochs_)
      for (const auto& [rank_index, epoch] : ours)
        if (their_index / size == rank_index / size)
          behind = std::max(behind, static_cast<int64_t>(epoch - their_epoch));
    return "it is alive, " + std::to_string(behind) + (behind == 1 ? " op" : " ops") + " behind";
  }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point heard_ = Clock::now();
  Epochs epochs_;
};

// A region by the number of its process and its own number there.
using RegionName = std::pair<uint64_t, uint64_t>;

class Sharing {
 public:
  static constexpr int kNoRankIndex = -1;

  // Called on the sharing thread.
  struct Hooks {
    // A process has ended without goodbye, or broken a rule of the protocol; `why` says which. Its notes are no longer
    // read.
    std::function<void(int process, const std::string& why)> lost;
    // Ops that the ranks of this process have finished, by rank index. Empty before the signal pads are there.
    std::function<Epochs()> epochs;
  };

  // Takes ownership of the sockets. `devices`: of this process, which write into mapped regions.
  Sharing(const Neighbours& neighbours, std::vector<int> devices, Hooks hooks);
  ~Sharing();
  Sharing(const Sharing&) = delete;
  Sharing& operator=(const Sharing&) = delete;

  // Sends all answers, says goodbye, and stops answering. May be called twice.
  void close();

  // Unmaps all regions. Called after close(), when this process uses the regions no more.
  void unmap();

  // Replaces the open timeout: how long the calls below wait for a process once the group is open.
  void set_timeout(double seconds);

  // The region's address in each of `processes`, by process. Asks each process to map the region, once. `rank_index`:
  // the rank whose signal pad the region is. The region must live until close(). Throws GroupException.
  std::vector<char*> share(const Region& region, const std::set<int>& processes, int rank_index = kNoRankIndex);

  // The address of the signal pad of a rank of `process`. Waits until `process` has shared the signal pad. Throws
  // GroupException.
  char* await_signal_pad(int process, int rank_index);

  // Whether a process is slow or dead, for the text of an error: "no heartbeat for 5 s", "it is alive, 2 ops behind".
  // Does not block.
  std::string state_of(int process) const;

 private:
  using Clock = std::chrono::steady_clock;
  struct Peer {
    bool other;  // whether it is another process, which has, or had, a socket
    Outbox outbox;
    LastSeen last_seen;
    uint64_t owner;    // the number in its notes; zero before the first
    std::string gone;  // why its notes are no longer read
  };
  struct Answer {  // of one process, about one region of this one
    bool asked, answered;
    char* base;
    std::string refusal;
  };

  void serve();
  void listen_until(Clock::time_point moment);
  void attend(int process);
  void say_goodbye();
  void beat();
  void push(int process, const Note& note, int descriptor = -1);
  void wake();
  void handle(int process, const Note& note, const Descriptor& descriptor);
  void map(int process, const Note& request, const Descriptor& descriptor);
  void lose(int process, const std::string& why);
  std::string breach_of(int process, const Note& note) const;
  std::string breach_of_share(int process, const Note& note) const;
  bool lives_at(int rank_index, int process) const;
  std::string state_here(int process) const;
  void await(std::unique_lock<std::mutex>& lock, int process, const char* doing, const std::function<bool()>& ready);

  const std::vector<std::vector<int>> processes_;
  const std::vector<int> devices_;
  const Hooks hooks_;
  Descriptor wake_;  // wakes the thread
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::chrono::duration<double> timeout_;
  std::vector<Peer> peers_;                         // by process; without a socket where there is none
  std::map<uint64_t, std::vector<Answer>> shared_;  // by region and process
  std::set<RegionName> mapped_;                     // of other processes
  std::map<int, char*> signal_pads_;                // of other processes, by rank index
  Epochs epochs_;                                   // of this process, by rank index, at the last heartbeat
  bool closing_ = false;
  std::thread thread_;
};

}  // namespace jax_ep
