// A group as the host sees it: which device is which rank of which line, their heaps, and what went wrong.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "device/heap.h"
#include "heap/memory.h"

namespace jax_ep {

// The place of a device: its line along the group's axis, and its rank there.
struct Seat {
  int line, rank;
};

struct GroupError {
  std::string kind;  // the name of the Python exception
  std::string message;
  bool fatal;
};

const char* name_of(OpKind op);

class Group {
 public:
  // `lines` holds device ordinals in rank order. Throws std::invalid_argument.
  Group(std::vector<std::vector<int>> lines, double timeout_seconds, bool poison);
  virtual ~Group() = default;
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  int size() const { return static_cast<int>(lines_.front().size()); }
  int line_count() const { return static_cast<int>(lines_.size()); }
  double timeout_seconds() const { return timeout_seconds_; }
  const Comm& comm(Seat seat) const { return comms_[seat.line * size() + seat.rank]; }

  int device_of(Seat seat) const { return lines_[seat.line][seat.rank]; }

  // The seat of a device, if it has one.
  std::optional<Seat> find_seat(int ordinal) const;

  // Ends the group: nothing runs on it any more. May be called twice.
  virtual void close();

  // Keeps memory that kernels use for as long as the group.
  void keep(std::shared_ptr<void> memory) { memory_.push_back(std::move(memory)); }

  // Fails the group for good. The first failure is kept, but one that names a silent peer replaces one that does not.
  void fail(GroupError error);
  std::optional<GroupError> failure() const;

  // What `check()` raises: the failure if there is one, else an error that left the group usable, once.
  std::optional<GroupError> take_error();

  // The error that the kernel of the last op reported at this seat.
  std::optional<GroupError> reported(Seat seat) const;

 private:
  GroupError describe(const Report& report) const;

  const std::vector<std::vector<int>> lines_;
  const double timeout_seconds_;
  std::vector<std::shared_ptr<void>> memory_;
  std::vector<Comm> comms_;
  mutable std::mutex mutex_;
  std::optional<GroupError> failure_;
  std::vector<uint64_t> epochs_taken_;
};

}  // namespace jax_ep
