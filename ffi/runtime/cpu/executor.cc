#include "runtime/cpu/executor.h"

#include <system_error>

#include "runtime/posix.h"

namespace jax_ep {

Worker::Worker() : thread_([this] { run(); }) {}

Worker::~Worker() {
  {
    std::lock_guard lock(mutex_);
    ending_ = true;
  }
  wake_.notify_one();
  thread_.join();
}

void Worker::enqueue(std::function<void()> job) {
  {
    std::lock_guard lock(mutex_);
    jobs_.push_back(std::move(job));
  }
  wake_.notify_one();
}

void Worker::run() {
  name_thread("jax_ep rank");
  std::unique_lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [this] { return ending_ || !jobs_.empty(); });
    if (jobs_.empty()) return;
    std::function<void()> job = std::move(jobs_.front());
    jobs_.pop_front();
    lock.unlock();
    job();
    job = nullptr;
    lock.lock();
  }
}

Elastic::Elastic() : state_(std::make_shared<State>()) {
  std::thread([state = state_] { serve(state); }).detach();
}

void Elastic::end() {
  std::lock_guard lock(state_->mutex);
  state_->ending = true;
  state_->wake.notify_all();
}

void Elastic::run(std::function<void()> job) {
  std::lock_guard lock(state_->mutex);
  state_->jobs.push_back(std::move(job));
  state_->wake.notify_one();
  if (state_->idle >= state_->jobs.size()) return;
  try {
    std::thread([state = state_] { serve(state); }).detach();
  } catch (const std::system_error&) {  // the next free thread takes the job
  }
}

void Elastic::serve(const std::shared_ptr<State>& state) {
  name_thread("jax_ep results");
  std::unique_lock lock(state->mutex);
  for (;;) {
    ++state->idle;
    state->wake.wait(lock, [&] { return state->ending || !state->jobs.empty(); });
    --state->idle;
    if (state->jobs.empty()) return;
    std::function<void()> job = std::move(state->jobs.front());
    state->jobs.pop_front();
    lock.unlock();
    job();
    job = nullptr;
    lock.lock();
  }
}

}  // namespace jax_ep
