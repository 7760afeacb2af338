// What the threads behind the CPU's streams do where the system has no thread to give (pids.max, ulimit -u): nothing
// ends the process, and every result is handed out, if later.
#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <system_error>
#include <thread>

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

using Count = std::atomic<int>;  // of jobs

// Whether so many are counted in time.
bool reaches(const Count& count, int jobs, double seconds = 10) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  while (count < jobs && std::chrono::steady_clock::now() < until) std::this_thread::yield();
  return count >= jobs;
}

TEST_CASE("a job waits for a free thread") {
  Count begun = 0, released = 0, done = 0;
  Elastic elastic;
  no_threads = true;
  elastic.run([&] {
    ++begun;
    reaches(released, 1);
    ++done;
  });
  expect(reaches(begun, 1), "the first thread takes a job");
  for (int i = 0; i < 100; ++i) elastic.run([&] { ++done; });
  expect(!reaches(done, 1, 0.05), "nobody is free");
  ++released;
  expect(reaches(done, 101), "then one after another is done");
  no_threads = false;
}

TEST_CASE("every job has a thread where there are threads") {
  Count begun = 0, done = 0;
  Elastic elastic;
  for (int i = 0; i < 3; ++i)
    elastic.run([&] {
      ++begun;
      reaches(begun, 3);  // each waits for the others, as collectives do
      ++done;
    });
  expect(reaches(done, 3, 9), "every job has a thread");
}

TEST_CASE("a worker without a thread is an error") {
  no_threads = true;
  CHECK_THROWS_AS(Worker(), std::system_error);
  no_threads = false;
}

}  // namespace
}  // namespace jax_ep
