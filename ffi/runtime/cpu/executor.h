// The CPU's streams: a thread per rank that runs its part of an op, and threads that hand results back to XLA.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

namespace jax_ep {

// Jobs for the threads that serve them.
class Jobs {
 public:
  // Returns whether a thread is free for the job.
  bool add(std::function<void()> job);
  // Threads end when there are no jobs.
  void end();
  // The loop of a thread with this name.
  void serve(const char* thread);

 private:
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> jobs_;
  std::size_t idle_ = 0;  // threads
  bool ending_ = false;
};

// Runs jobs one after another on a thread of its own.
class Worker {
 public:
  ~Worker() {  // runs what is left, then ends
    jobs_.end();
    thread_.join();
  }
  void enqueue(std::function<void()> job) { jobs_.add(std::move(job)); }

 private:
  Jobs jobs_;
  std::thread thread_{[this] { jobs_.serve("jax_ep rank"); }};
};

// Runs every job at once, on a thread that no other job holds: a job continues XLA's work, which may block in a
// collective. Threads are not joined; they end when they have no job. If the system can make no more threads, jobs wait
// for an existing one. The first thread is made by the constructor.
class Elastic {
 public:
  Elastic() { add_thread(); }  // throws std::system_error
  ~Elastic() { end(); }
  void run(std::function<void()> job);
  // Idle threads end, and every other thread ends after its job. Later jobs still run.
  void end() { jobs_->end(); }

 private:
  void add_thread();

  const std::shared_ptr<Jobs> jobs_ = std::make_shared<Jobs>();
};

}  // namespace jax_ep
