#include "platform/cpu/cpu_group.h"

#include <algorithm>

namespace jax_ep {

CpuGroup::CpuGroup(std::vector<std::vector<int>> lines, double timeout_seconds, bool poison, Neighbours neighbours)
    : Group(std::move(lines), timeout_seconds, poison, std::move(neighbours)) {
  for (int i = 0; i < line_count() * size(); ++i) workers_.push_back(std::make_unique<Worker>());
  watch_ = std::thread([this] { watch(); });
}

CpuGroup::~CpuGroup() { close(); }

void CpuGroup::arrive(const Site* site, int64_t run, OpKind op, Seat seat, Task task, Completion done) {
  std::unique_lock lock(gather_mutex_);
  if (const std::optional<GroupError> error = failure()) {
    changed_.notify_one();  // nobody else may have said so to who is parked
    lock.unlock();
    return done(error);
  }
  if (seat.rank == stalled_arrival_) {
    stalled_.push_back(std::move(done));
    return;
  }
  const Key key{site, run, seat.line};
  const auto timeout = std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout_seconds()));
  Gathering& gathering = gatherings_.try_emplace(key, Gathering{op, Clock::now() + timeout, {}}).first->second;
  gathering.arrivals.insert_or_assign(seat.rank, Arrival{std::move(task), std::move(done)});
  if (gathering.arrivals.size() == local_devices(seat.line).size()) {
    start(seat.line, std::move(gathering.arrivals));
    gatherings_.erase(key);
  }
  changed_.notify_one();
}

// Under the lock, so that every rank's worker meets the ops in one order: no two of them can wait for each other.
void CpuGroup::start(int line, std::map<int, Arrival> arrivals) {
  for (auto& [rank, arrival] : arrivals) {
    const Seat seat{line, rank};
    workers_[line * size() + rank]->enqueue(
        [this, seat, arrival = std::move(arrival)] { run(seat, arrival.task, arrival.done); });
  }
}

std::optional<GroupError> CpuGroup::perform(const Task& task) {
  try {
    task();
    return std::nullopt;
  } catch (const GroupException& failure) {
    return failure.error;
  } catch (const std::exception& error) {
    return GroupError{"JaxEpError", error.what(), true};
  }
}

void CpuGroup::run(Seat seat, const Task& task, const Completion& done) {
  const Comm& here = comm(seat);
  while (seat.rank == stalled_protocol_ && !failure() && !load_acquire(&here.heaps[seat.rank]->abort))
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  std::optional<GroupError> error = perform(task);
  if (error)
    give_up(seat, *error);
  else
    error = reported(seat);
  if (!error && load_acquire(&here.heaps[seat.rank]->abort))
    error = failure();  // an op that began after it has no report
  if (error && error->fatal) {
    std::lock_guard lock(gather_mutex_);  // or watch() could be between looking for a failure and waiting for news
    fail(*error);
    changed_.notify_one();
  }
  completions_.run([done, error = std::move(error)] { done(error); });
}

// Waits for the earliest deadline among the gatherings; when one passes, the group fails and everybody is released.
void CpuGroup::watch() {
  std::unique_lock lock(gather_mutex_);
  while (!closed_) {
    if (const std::optional<GroupError> error = failure()) release(*error);
    const auto late = [](const auto& a, const auto& b) { return a.second.deadline < b.second.deadline; };
    const auto first = std::min_element(gatherings_.begin(), gatherings_.end(), late);
    if (first == gatherings_.end()) {
      changed_.wait(lock);
    } else if (Clock::now() >= first->second.deadline) {
      fail(nobody_came(std::get<2>(first->first), first->second));
    } else {
      changed_.wait_until(lock, first->second.deadline);
    }
  }
}

void CpuGroup::release(const GroupError& error) {
  const auto complete = [&](Completion done) { completions_.run([done = std::move(done), error] { done(error); }); };
  for (auto& [key, gathering] : gatherings_)
    for (auto& [rank, arrival] : gathering.arrivals) complete(std::move(arrival.done));
  for (Completion& done : stalled_) complete(std::move(done));
  gatherings_.clear();
  stalled_.clear();
}

GroupError CpuGroup::nobody_came(int line, const Gathering& gathering) const {
  std::string missing;
  for (int rank = 0; rank < size(); ++rank)
    if (is_local({line, rank}) && !gathering.arrivals.count(rank))
      missing += (missing.empty() ? "rank " : ", rank ") + std::to_string(rank);
  char seconds[32];
  std::snprintf(seconds, sizeof(seconds), "%g", timeout_seconds());
  return {"PeerTimeoutError",
          std::string(name_of(gathering.op)) + ": " + missing + " did not arrive within " + seconds +
              " s of the first rank; the group has failed",
          true};
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
