// The CPU's streams: a thread per rank that runs its part of an op, and threads that hand results back to XLA.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

namespace jax_ep {

// Runs jobs one after another on a thread of its own.
class Worker {
 public:
  Worker();
  ~Worker();  // runs what is left, then ends
  void enqueue(std::function<void()> job);

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> jobs_;
  bool ending_ = false;
  std::thread thread_;
};

// Runs every job at once, on a thread that no other job holds: a job continues XLA's work, which may block in a
// collective. Threads are not joined; they end when they have no job. If the system can make no more threads, jobs wait
// for an existing one. The first thread is made by the constructor.
class Elastic {
 public:
  Elastic();  // throws std::system_error
  ~Elastic() { end(); }
  void run(std::function<void()> job);
  // Idle threads end, and every other thread ends after its job. Later jobs still run.
  void end();

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable wake;
    std::deque<std::function<void()>> jobs;
    size_t idle = 0;
    bool ending = false;
  };
  static void serve(const std::shared_ptr<State>& state);

  std::shared_ptr<State> state_;
};

}  // namespace jax_ep
