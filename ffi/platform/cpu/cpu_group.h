// A group on the CPU: gathers the ranks' arrivals at each call site, then runs the op on the ranks' own threads.
// No thread of XLA ever waits for a peer.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "device/platform.h"
#include "heap/group.h"
#include "platform/cpu/executor.h"

namespace jax_ep {

// Identifies a call site of a compiled program; XLA makes one per custom call.
struct Site {};

using Task = std::function<void()>;
using Completion = std::function<void(std::optional<GroupError>)>;

class CpuGroup final : public Group {
 public:
  CpuGroup(std::vector<std::vector<int>> lines, double timeout_seconds, bool poison, Neighbours neighbours = {});
  ~CpuGroup() override;

  // One rank has come to a site in a run of its program. When all ranks of its line have that are of this process,
  // their tasks run; `done` is called exactly once, on a thread that may block.
  void arrive(const Site* site, int64_t run, OpKind op, Seat seat, Task task, Completion done);

  // The most squads that an op has.
  int most_squads() const { return 1; }
  // A rank's part of an op is one thread.
  void limit_processors(int) {}

  // Test hook: this rank never arrives ("arrival"), or stops inside the protocol ("protocol"), until the group fails.
  void stall(int rank, const std::string& where);

  void close() override;

 private:
  using Clock = std::chrono::steady_clock;
  struct Arrival {
    Task task;
    Completion done;
  };
  struct Gathering {
    OpKind op;
    Clock::time_point deadline;
    std::map<int, Arrival> arrivals;  // by rank
  };
  using Key = std::tuple<const Site*, int64_t, int>;  // site, run, line

  void start(int line, std::map<int, Arrival> arrivals);
  static std::optional<GroupError> perform(const Task& task);
  void run(Seat seat, const Task& task, const Completion& done);
  void watch();
  void release(const GroupError& error);
  GroupError nobody_came(int line, const Gathering& gathering) const;

  std::mutex gather_mutex_;
  std::condition_variable changed_;
  std::map<Key, Gathering> gatherings_;
  std::vector<Completion> stalled_;
  std::atomic<int> stalled_arrival_ = -1;
  std::atomic<int> stalled_protocol_ = -1;
  bool closed_ = false;
  Elastic completions_;
  std::vector<std::unique_ptr<Worker>> workers_;  // by line and rank
  std::thread watch_;
};

}  // namespace jax_ep
