#include "runtime/cpu/executor.h"

#include <system_error>

#include "runtime/posix.h"

namespace jax_ep {

bool Jobs::add(std::function<void()> job) {
  std::lock_guard lock(mutex_);
  jobs_.push_back(std::move(job));
  wake_.notify_one();
  return idle_ >= jobs_.size();
}

void Jobs::end() {
  std::lock_guard lock(mutex_);
  ending_ = true;
  wake_.notify_all();
}

void Jobs::serve(const char* thread) {
  name_thread(thread);
  std::unique_lock lock(mutex_);
  for (;;) {
    ++idle_;
    wake_.wait(lock, [this] { return ending_ || !jobs_.empty(); });
    --idle_;
    if (jobs_.empty()) return;
    std::function<void()> job = std::move(jobs_.front());
    jobs_.pop_front();
    lock.unlock();
    job();
    job = nullptr;
    lock.lock();
  }
}

void Elastic::add_thread() {
  std::thread([jobs = jobs_] { jobs->serve("jax_ep results"); }).detach();
}

void Elastic::run(std::function<void()> job) {
  if (jobs_->add(std::move(job))) return;
  try {
    add_thread();
  } catch (const std::system_error&) {  // the next free thread takes the job
  }
}

}  // namespace jax_ep
