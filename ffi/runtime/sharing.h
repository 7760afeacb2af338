// How the processes of a group share memory: each process maps the regions of the others, and answers with the address.
// A thread answers requests, so that no process waits for another's Python.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "runtime/error.h"
#include "runtime/note.h"
#include "runtime/region.h"

namespace jax_ep {

// The processes of a group's ranks, on one host. Empty for a group of one process.
struct Neighbours {
  std::vector<std::vector<int>> processes;  // by line and rank
  std::vector<int> sockets;                 // by process, connected, in message mode; -1 where there is none
  double open_timeout;                      // seconds that creating the group waits for one of them
};

// A region by the number of its process and its own number there.
using RegionName = std::pair<uint64_t, uint64_t>;

class Sharing {
 public:
  static constexpr int kNoRankIndex = -1;

  // Called on the sharing thread when a process has ended without goodbye, or broken a rule of the protocol; `why` says
  // which. Its notes are no longer read.
  using Lost = std::function<void(int process, const std::string& why)>;

  // Takes ownership of the sockets. `devices`: of this process, which write into mapped regions.
  Sharing(const Neighbours& neighbours, std::vector<int> devices, Lost lost);
  ~Sharing();

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

  // How a process is, for the text of an error: "it is alive", "it is stopped", "it has ended", "it has closed the
  // group". Does not block.
  std::string state_of(int process) const;

 private:
  using Clock = std::chrono::steady_clock;
  struct Peer {
    bool other;  // whether it is another process, which has, or had, a socket
    Outbox outbox;
    uint64_t owner;    // the number in its notes; zero before the first
    std::string gone;  // why its notes are no longer read
  };
  struct Answer {  // of one process, about one region of this one
    bool asked, answered;
    char* base;
    std::string refusal;
  };

  void serve();
  void listen();
  void attend(int process);
  void say_goodbye();
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
  const Lost lost_;
  Descriptor wake_;  // wakes the thread
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::chrono::duration<double> timeout_;
  std::vector<Peer> peers_;                         // by process; without a socket where there is none
  std::map<uint64_t, std::vector<Answer>> shared_;  // by region and process
  std::set<RegionName> mapped_;                     // of other processes
  std::map<int, char*> signal_pads_;                // of other processes, by rank index
  bool closing_ = false;
  std::thread thread_;
};

}  // namespace jax_ep
