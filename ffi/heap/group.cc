#include "heap/group.h"

#include <algorithm>
#include <stdexcept>

#include "kernels/signature.h"

namespace jax_ep {

const char* name_of(OpKind op) { return names_of(op).op; }

Group::Group(std::vector<std::vector<int>> lines, double timeout_seconds, bool poison, Neighbours neighbours)
    : lines_(std::move(lines)), timeout_seconds_(timeout_seconds), processes_(std::move(neighbours.processes)) {
  if (!processes_.empty())
    sharing_ = std::make_unique<Sharing>(std::move(neighbours.sockets), local_devices(), timeout_seconds,
                                         [this](int process) { lose(process); });
  if (lines_.empty() || lines_.front().empty()) throw std::invalid_argument("a group needs at least one device");
  if (size() > kMaxRanks)
    throw std::invalid_argument("a group has at most " + std::to_string(kMaxRanks) + " ranks, got " +
                                std::to_string(size()));
  for (int line = 0; line < line_count(); ++line) open_line(line, poison);
  epochs_taken_.resize(line_count());
  open_ = true;
  if (const std::optional<GroupError> failed = failure()) throw GroupException(*failed);
}

Group::~Group() = default;

void Group::open_line(int line, bool poison) {
  connect_devices(local_devices(line));
  Comm comm{};
  comm.size = size();
  comm.poison = poison;
  comm.timeout_ns = static_cast<uint64_t>(timeout_seconds_ * 1e9);
  if (!local_devices(line).empty())
    for (int rank = 0; rank < size(); ++rank) comm.heaps[rank] = static_cast<Heap*>(make_heap({line, rank}));
  for (comm.rank = 0; comm.rank < size(); ++comm.rank) {
    comm.report = nullptr;
    if (is_local({line, comm.rank})) {
      memory_.push_back(allocate_on_host(sizeof(Report)));
      comm.report = static_cast<Report*>(memory_.back().get());
    }
    comms_.push_back(comm);
  }
}

void* Group::make_heap(Seat seat) {
  const int device = device_of(seat), index = index_of(seat);
  if (!is_local(seat)) return sharing_->await_heap(processes_[seat.line][seat.rank], index);
  if (!sharing_) {
    memory_.push_back(allocate_on_device(device, sizeof(Heap)));
    return memory_.back().get();
  }
  const Region region = allocate_region(device, sizeof(Heap), local_devices(seat.line));
  clear_on_device(device, region.base, sizeof(Heap));
  sharing_->share(region, index);
  return region.base;
}

std::vector<int> Group::local_devices(int line) const {
  std::vector<int> devices;
  for (const int device : lines_[line])
    if (device >= 0) devices.push_back(device);
  return devices;
}

std::vector<int> Group::local_devices() const {
  std::vector<int> all;
  for (int line = 0; line < line_count(); ++line)
    for (const int device : local_devices(line)) all.push_back(device);
  return all;
}

void* Group::reach(Seat seat, int slot, void* data, std::size_t bytes, Comm* comm) {
  if (bytes == 0 || (!sharing_ && !staging_all_)) return data;
  std::optional<Region> region;
  if (!staging_all_) region = find_region(device_of(seat), data, bytes);
  if (!region) {
    region = staging(seat, slot, bytes);
    data = region->base;
  }
  if (!sharing_) return data;
  const std::vector<char*> bases = sharing_->share(*region);
  for (int peer = 0; peer < size(); ++peer)
    comm->shifts[slot][peer] = bases[processes_[seat.line][peer]] - region->base;
  return data;
}

// Grows by doubling. The old region stays: a captured graph may still use it.
Region Group::staging(Seat seat, int slot, std::size_t bytes) {
  std::lock_guard lock(staging_mutex_);
  Region& region = staging_[{index_of(seat), slot}];
  if (region.bytes < bytes)
    region = allocate_region(device_of(seat), std::max(bytes, 2 * region.bytes), local_devices(seat.line));
  return region;
}

// On the sharing thread.
void Group::lose(int process) {
  std::map<int, int> culprits;  // by line of this process
  for (int line = 0; line < line_count(); ++line)
    for (int rank = 0; rank < size(); ++rank)
      if (processes_[line][rank] == process && !local_devices(line).empty()) culprits.emplace(line, rank);
  if (culprits.empty()) return;
  const int first = culprits.begin()->second;
  fail({"PeerLostError", "the process of rank " + std::to_string(first) + " has ended; the group has failed", true});
  if (!open_) return;
  for (const auto [line, culprit] : culprits)
    for (int rank = 0; rank < size(); ++rank)
      if (is_local({line, rank})) raise_abort({line, rank}, rank, culprit);
}

void Group::give_up(Seat seat, GroupError error) {
  fail(std::move(error));
  for (int line = 0; line < line_count(); ++line) {
    int here = 0;  // the first rank of this process
    while (here < size() && !is_local({line, here})) ++here;
    for (int rank = 0; here < size() && rank < size(); ++rank) {
      try {
        raise_abort({line, is_local({line, rank}) ? rank : here}, rank, line == seat.line ? seat.rank : here);
      } catch (const std::exception&) {  // then the kernel finds out by its deadline
      }
    }
  }
}

void Group::raise_abort(Seat seat, int rank, int culprit) {
  signal_device(device_of(seat), &comm(seat).heaps[rank]->abort, static_cast<uint8_t>(culprit + 1));
}

std::optional<Seat> Group::find_seat(int ordinal) const {
  for (int line = 0; line < line_count(); ++line)
    for (int rank = 0; rank < size(); ++rank)
      if (lines_[line][rank] == ordinal) return Seat{line, rank};
  return std::nullopt;
}

void Group::close() {
  fail({"GroupClosedError", "the group was closed before the op ran", true});
  if (sharing_) sharing_->close();
}

}  // namespace jax_ep
