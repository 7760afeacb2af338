// A group on the CPU. It gathers the ranks' arrivals at each call site, then runs the op on the ranks' own threads.
// XLA's threads never wait for a peer.
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

#include "comm/platform.h"
#include "comm/spin.h"
#include "runtime/cpu/executor.h"
#include "runtime/group.h"
#include "runtime/profiler.h"

namespace jax_ep {

// The call of an arriving rank.
struct Arriving {
  Signature signature;
  int32_t site;  // a number, for errors
};

using Task = std::function<void()>;
using Completion = std::function<void(std::optional<GroupError>)>;

class CpuGroup final : public Group {
 public:
  CpuGroup(std::vector<std::vector<int>> lines, double timeout_seconds, bool poison, Neighbours neighbours = {},
           int64_t id = 0);
  ~CpuGroup() override;

  // Takes the arrival of one rank at a call site, in a run of its program. When all local ranks of the line have
  // arrived, their tasks run. `done` is called exactly once, on a thread that may block. If the op has failed, `done`
  // is called when all these tasks have ended, as a slow task may still write into the buffers of other ranks.
  void arrive(const void* site, int64_t run, const Arriving& what, RankId rank_id, Task task, Completion done);

  // The most CTAs that an op has.
  int max_ctas() const { return 1; }
  Products products() const { return {}; }
  // A rank's part of an op is one thread.
  void limit_sms(int) {}

  // Test hook: this rank never arrives ("arrival"), or stops inside the protocol ("protocol"), until the group fails.
  void stall(int rank, const std::string& where);

  void close() override;

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::milliseconds kLook{500};  // the interval at which watch() checks deadlines
  struct Arrival {
    Task task;
    Completion done;
  };
  struct WaitingOp {
    Arriving what;
    Clock::time_point deadline;
    std::map<int, Arrival> arrivals;  // by rank
  };
  using Key = std::tuple<const void*, int64_t, int>;  // site, run, line

  // The number of an op's tasks that still run, and the completions that wait for their end. Under gather_mutex_.
  struct Running {
    std::size_t tasks;
    std::vector<std::function<void()>> held;
  };

  void start(int line, std::map<int, Arrival> arrivals);
  void run(RankId rank_id, const Arrival& arrival, Running& running);
  std::optional<GroupError> outcome(RankId rank_id, const Task& task);
  void watch();
  void release(const GroupError& error);
  GroupError nobody_came(const Key& key, const WaitingOp& op) const;
  const WaitingOp* elsewhere(const Key& key, int rank) const;

  std::mutex gather_mutex_;
  std::condition_variable changed_;
  std::map<Key, WaitingOp> waiting_ops_;
  std::vector<Completion> stalled_;
  std::atomic<int> stalled_arrival_ = -1;
  std::atomic<int> stalled_protocol_ = -1;
  bool closed_ = false;
  Elastic completions_;
  std::vector<std::unique_ptr<Worker>> workers_;  // by line and rank
  std::thread watch_;
};

}  // namespace jax_ep
