#include "heap/group.h"

#include <cstdio>
#include <stdexcept>

namespace jax_ep {

const char* name_of(OpKind op) {
  switch (op) {
    case OpKind::dispatch:
      return "dispatch";
    case OpKind::scatter:
      return "combine's backward pass";
    case OpKind::combine:
      return "combine";
    case OpKind::ragged_all_to_all:
      return "ragged_all_to_all";
    case OpKind::matmul_all_reduce:
      return "matmul_all_reduce";
    case OpKind::matmul_reduce_scatter:
      return "matmul_reduce_scatter";
    case OpKind::all_gather_matmul:
      return "all_gather_matmul";
  }
  return "an op";
}

Group::Group(std::vector<std::vector<int>> lines, double timeout_seconds, bool poison)
    : lines_(std::move(lines)), timeout_seconds_(timeout_seconds) {
  if (lines_.empty() || lines_.front().empty()) throw std::invalid_argument("a group needs at least one device");
  if (size() > kMaxRanks)
    throw std::invalid_argument("a group has at most " + std::to_string(kMaxRanks) + " ranks, got " +
                                std::to_string(size()));
  for (const std::vector<int>& line : lines_) {
    connect_devices(line);
    Comm comm{};
    comm.size = size();
    comm.poison = poison;
    comm.timeout_ns = static_cast<uint64_t>(timeout_seconds * 1e9);
    for (int rank = 0; rank < size(); ++rank) {
      memory_.push_back(allocate_on_device(line[rank], sizeof(Heap)));
      comm.heaps[rank] = static_cast<Heap*>(memory_.back().get());
    }
    for (comm.rank = 0; comm.rank < size(); ++comm.rank) {
      memory_.push_back(allocate_on_host(sizeof(Report)));
      comm.report = static_cast<Report*>(memory_.back().get());
      comms_.push_back(comm);
    }
  }
  epochs_taken_.resize(comms_.size());
}

std::optional<Seat> Group::find_seat(int ordinal) const {
  for (int line = 0; line < line_count(); ++line)
    for (int rank = 0; rank < size(); ++rank)
      if (lines_[line][rank] == ordinal) return Seat{line, rank};
  return std::nullopt;
}

void Group::close() { fail({"GroupClosedError", "the group was closed before the op ran", true}); }

void Group::fail(GroupError error) {
  std::lock_guard lock(mutex_);
  const bool better = failure_ && failure_->kind == "PeerLostError" && error.kind == "PeerTimeoutError";
  if (!failure_ || better) failure_ = std::move(error);
}

std::optional<GroupError> Group::failure() const {
  std::lock_guard lock(mutex_);
  return failure_;
}

std::optional<GroupError> Group::take_error() {
  std::optional<GroupError> recoverable;
  for (size_t i = 0; i < comms_.size(); ++i) {
    const Report& report = *comms_[i].report;
    const uint64_t epoch = __atomic_load_n(&report.epoch, __ATOMIC_ACQUIRE);
    if (epoch <= epochs_taken_[i]) continue;
    GroupError error = describe(report);
    if (error.fatal) {
      fail(std::move(error));
    } else {
      epochs_taken_[i] = epoch;
      recoverable = std::move(error);
    }
  }
  const std::optional<GroupError> failed = failure();
  return failed ? failed : recoverable;
}

std::optional<GroupError> Group::reported(Seat seat) const {
  const Comm& here = comm(seat);
  const uint64_t epoch = __atomic_load_n(&here.report->epoch, __ATOMIC_ACQUIRE);
  if (epoch == 0 || epoch != here.heaps[seat.rank]->epoch) return std::nullopt;
  return describe(*here.report);
}

GroupError Group::describe(const Report& report) const {
  char text[256];
  const char* op = name_of(report.op);
  const long long expected = report.expected, seen = report.seen;
  switch (report.failure) {
    case Failure::timeout:
      std::snprintf(text, sizeof(text),
                    "%s: rank %d waited %g s for rank %d in vain (expected flag %lld, saw %lld); the group has failed",
                    op, report.rank, timeout_seconds_, report.peer, expected, seen);
      return {"PeerTimeoutError", text, true};
    case Failure::peer_lost:
      std::snprintf(text, sizeof(text), "%s: rank %d gave up because rank %d did not answer; the group has failed", op,
                    report.rank, report.peer);
      return {"PeerLostError", text, true};
    case Failure::capacity:
      std::snprintf(text, sizeof(text), "%s: rank %d needs %lld rows but capacity is %lld", op, report.rank, seen,
                    expected);
      return {"CapacityError", text, false};
    case Failure::invalid_routing:
      std::snprintf(text, sizeof(text),
                    "%s: rank %d, with rank %d: a slice lies outside its buffer or its size differs from what the "
                    "receiver expects (expected at most %lld, got %lld)",
                    op, report.rank, report.peer, expected, seen);
      return {"InvalidRoutingError", text, false};
    case Failure::none:
      break;
  }
  return {"JaxEpError", "an op failed without a reason", true};
}

}  // namespace jax_ep
