// What the threads behind the CPU's streams do where the system has no thread to give (pids.max, ulimit -u): nothing
// ends the process, and every result is handed out, if later.
#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <system_error>

#include "expect.h"
#include "runtime/cpu/executor.h"

namespace {

std::atomic<bool> no_threads{false};

}  // namespace

// Stands before that of the C library, for std::thread too.
extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*start)(void*),
                              void* argument) {
  using Create = int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  static const auto create = reinterpret_cast<Create>(dlsym(RTLD_NEXT, "pthread_create"));
  return no_threads ? EAGAIN : create(thread, attributes, start, argument);
}

namespace jax_ep {
namespace {

// Counts jobs that are done.
class Count {
 public:
  void add() {
    const std::lock_guard lock(mutex_);
    ++done_;
    changed_.notify_all();
  }
  // Whether so many were done in time.
  bool reaches(int count, double seconds = 10) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return done_ >= count; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int done_ = 0;
};

TEST_CASE("a job waits for a free thread") {
  Count begun, released, done;
  Elastic elastic;
  no_threads = true;
  elastic.run([&] {
    begun.add();
    released.reaches(1);
    done.add();
  });
  expect(begun.reaches(1), "the first thread takes a job");
  for (int i = 0; i < 100; ++i) elastic.run([&] { done.add(); });
  expect(!done.reaches(1, 0.05), "nobody is free");
  released.add();
  expect(done.reaches(101), "then one after another is done");
  no_threads = false;
}

TEST_CASE("every job has a thread where there are threads") {
  Count begun, done;
  Elastic elastic;
  for (int i = 0; i < 3; ++i)
    elastic.run([&] {
      begun.add();
      begun.reaches(3);  // each waits for the others, as collectives do
      done.add();
    });
  expect(done.reaches(3, 9), "every job has a thread");
}

TEST_CASE("a worker without a thread is an error") {
  no_threads = true;
  bool refused = false;
  try {
    Worker worker;
  } catch (const std::system_error&) {
    refused = true;
  }
  no_threads = false;
  expect(refused, "without a thread there is no worker");
}

}  // namespace
}  // namespace jax_ep
