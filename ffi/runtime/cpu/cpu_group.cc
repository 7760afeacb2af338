#include "runtime/cpu/cpu_group.h"

#include <algorithm>

#include "runtime/posix.h"

namespace jax_ep {

CpuGroup::CpuGroup(std::vector<std::vector<int>> lines, double timeout_seconds, bool poison, Neighbours neighbours,
                   int64_t id)
    : Group(std::move(lines), timeout_seconds, poison, std::move(neighbours), id) {
  for (int i = 0; i < line_count() * size(); ++i) workers_.push_back(std::make_unique<Worker>());
  watch_ = std::thread([this] { watch(); });
}

CpuGroup::~CpuGroup() { close(); }

void CpuGroup::arrive(const void* site, int64_t run, const Arriving& what, RankId rank_id, Task task, Completion done) {
  std::unique_lock lock(gather_mutex_);
  if (const std::optional<GroupError> error = failure()) {
    changed_.notify_one();  // watch() releases the parked ranks
    lock.unlock();
    return done(error);
  }
  if (rank_id.rank == stalled_arrival_) {
    stalled_.push_back(std::move(done));
    return;
  }
  const Key key{site, run, rank_id.line};
  const auto timeout = std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout_seconds()));
  WaitingOp& op = waiting_ops_.try_emplace(key, WaitingOp{what, Clock::now() + timeout, {}}).first->second;
  op.arrivals.insert_or_assign(rank_id.rank, Arrival{std::move(task), std::move(done)});
  if (op.arrivals.size() == local_devices(rank_id.line).size()) {
    start(rank_id.line, std::move(op.arrivals));
    waiting_ops_.erase(key);
  }
  changed_.notify_one();
}

// Called under the lock, so that all ranks' threads get the ops in one order. Otherwise two ranks could wait for each
// other.
void CpuGroup::start(int line, std::map<int, Arrival> arrivals) {
  const auto running = std::make_shared<Running>(Running{arrivals.size(), {}});
  for (auto& [rank, arrival] : arrivals) {
    const RankId rank_id{line, rank};
    workers_[line * size() + rank]->enqueue(
        [this, rank_id, running, arrival = std::move(arrival)] { run(rank_id, arrival, *running); });
  }
}

std::optional<GroupError> CpuGroup::outcome(RankId rank_id, const Task& task) {
  while (rank_id.rank == stalled_protocol_ && !failure() && !load_acquire(&signal_pad(rank_id)->abort))
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  std::optional<GroupError> error;
  try {
    task();
  } catch (const GroupException& failure) {
    error = failure.error;
  } catch (const std::exception& other) {
    error = {ErrorKind::other, other.what()};
  }
  if (error) give_up(rank_id, *error);
  if (!error) error = reported(rank_id);
  if (error) return error;
  const uint64_t abort = load_acquire(&signal_pad(rank_id)->abort);
  if (!abort) return std::nullopt;
  fail({ErrorKind::peer_lost,  // an op that began after it has no report
        concat("the group has failed at a peer, because rank ", abort - 1, " did not answer or runs another op")});
  return failure();
}

void CpuGroup::run(RankId rank_id, const Arrival& arrival, Running& running) {
  std::optional<GroupError> error = outcome(rank_id, arrival.task);
  const bool failed = error && is_fatal(error->kind);
  std::function<void()> complete = [done = arrival.done, error = std::move(error)] { done(error); };
  std::lock_guard lock(gather_mutex_);  // or watch() could be between looking for a failure and waiting for news
  if (failed) {
    running.held.push_back(std::move(complete));
    changed_.notify_one();
  } else {
    completions_.run(std::move(complete));
  }
  if (--running.tasks > 0) return;
  for (std::function<void()>& held : running.held) completions_.run(std::move(held));
}

// Waits for the earliest deadline among the gatherings. When a deadline passes, the group fails and all ranks are
// released. Time in which this process was suspended does not count.
void CpuGroup::watch() {
  name_thread("jax_ep watch");
  std::unique_lock lock(gather_mutex_);
  while (!closed_) {
    if (const std::optional<GroupError> error = failure()) release(*error);
    const auto late = [](const auto& a, const auto& b) { return a.second.deadline < b.second.deadline; };
    const auto first = std::min_element(waiting_ops_.begin(), waiting_ops_.end(), late);
    const Clock::time_point now = Clock::now();
    if (first == waiting_ops_.end()) {
      changed_.wait(lock);
    } else if (now >= first->second.deadline) {
      fail(nobody_came(first->first, first->second));
    } else {
      const Clock::time_point look = std::min(first->second.deadline, now + kLook);  // others may erase the op
      changed_.wait_until(lock, look);
      const Clock::duration away = Clock::now() - now - kLook;
      if (away < std::chrono::nanoseconds(kStoppedNs)) continue;
      for (auto& [key, op] : waiting_ops_) op.deadline += away;
    }
  }
}

void CpuGroup::release(const GroupError& error) {
  const auto complete = [&](Completion done) { completions_.run([done = std::move(done), error] { done(error); }); };
  for (auto& [key, op] : waiting_ops_)
    for (auto& [rank, arrival] : op.arrivals) complete(std::move(arrival.done));
  for (Completion& done : stalled_) complete(std::move(done));
  waiting_ops_.clear();
  stalled_.clear();
}

// The other op of the line in which a rank waits, or null.
const CpuGroup::WaitingOp* CpuGroup::elsewhere(const Key& key, int rank) const {
  for (const auto& [other, op] : waiting_ops_)
    if (other != key && std::get<2>(other) == std::get<2>(key) && op.arrivals.count(rank)) return &op;
  return nullptr;
}

GroupError CpuGroup::nobody_came(const Key& key, const WaitingOp& op) const {
  std::string missing, diverged;
  for (int rank = 0; rank < size(); ++rank) {
    if (!is_local({std::get<2>(key), rank}) || op.arrivals.count(rank)) continue;
    if (const WaitingOp* there = elsewhere(key, rank))
      diverged += concat("; rank ", rank, " waits in ", describe_call(there->what.signature, there->what.site));
    else
      missing += concat(missing.empty() ? "rank " : ", rank ", rank);
  }
  const std::string call = describe_call(op.what.signature, op.what.site);
  const std::string in_time =
      concat(" within ", timeout_seconds(), " s of rank ", op.arrivals.begin()->first, diverged);
  if (missing.empty())
    return fatal_error(ErrorKind::mismatch, call, ": not all ranks came", in_time,
                       ": all ranks must run the same ops in one order");
  return fatal_error(ErrorKind::peer_timeout, call, ": ", missing, " did not arrive", in_time);
}

void CpuGroup::stall(int rank, const std::string& where) {
  std::lock_guard lock(gather_mutex_);
  (where == "arrival" ? stalled_arrival_ : stalled_protocol_) = rank;
}

void CpuGroup::close() {
  {
    std::lock_guard lock(gather_mutex_);
    if (closed_) return;
    closed_ = true;
    Group::close();
    release(*failure());
  }
  changed_.notify_all();
  watch_.join();
  workers_.clear();
  completions_.end();
  release_regions();
}

}  // namespace jax_ep
