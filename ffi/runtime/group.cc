#include "runtime/group.h"

#include <algorithm>
#include <stdexcept>

#include "kernels/signature.h"

namespace jax_ep {
namespace {

constexpr std::size_t kLeastStaging = 1 << 16;  // bytes

// What kernels of a rank write for the host.
struct HostMemory {
  Report report;
  Marks marks;
};

}  // namespace

const char* name_of(OpKind op) { return names_of(op).op; }

Group::Group(std::vector<std::vector<int>> lines, double timeout_seconds, bool poison, Neighbours neighbours,
             int64_t id)
    : lines_(std::move(lines)),
      timeout_seconds_(timeout_seconds),
      processes_(std::move(neighbours.processes)),
      id_(id) {
  if (!processes_.empty())
    sharing_ =
        std::make_unique<Sharing>(Neighbours{processes_, std::move(neighbours.sockets), neighbours.open_timeout},
                                  local_devices(), [this](int process, const std::string& why) { lose(process, why); });
  if (lines_.empty() || lines_.front().empty())
    throw std::invalid_argument("Group: lines must have at least one device, got none");
  if (size() > kMaxRanks)
    throw std::invalid_argument(concat("Group: a line must have at most ", kMaxRanks, " ranks, got ", size()));
  for (int line = 0; line < line_count(); ++line) open_line(line, poison);
  epochs_taken_.resize(line_count());
  epochs_raised_.resize(line_count());
  calls_asked_.resize(line_count() * size());
  open_ = true;
  if (sharing_) sharing_->set_timeout(timeout_seconds_);
  if (const std::optional<GroupError> failed = failure()) throw GroupException(*failed);
}

void Group::open_line(int line, bool poison) {
  connect_devices(local_devices(line));
  Comm comm{};
  comm.size = size();
  comm.poison = poison;
  comm.timeout_ns = static_cast<uint64_t>(timeout_seconds_ * 1e9);
  const bool is_seen = !local_devices(line).empty();
  for (int rank = 0; rank < size(); ++rank)
    signal_pads_.push_back(is_seen ? static_cast<SignalPad*>(make_signal_pad({line, rank})) : nullptr);
  for (comm.rank = 0; comm.rank < size(); ++comm.rank) {
    const RankId rank_id{line, comm.rank};
    comms_.push_back(comm);
    marks_.push_back(nullptr);
    if (!is_local(rank_id)) continue;
    memory_.push_back(allocate_on_host(sizeof(HostMemory), id_));
    auto* const memory = static_cast<HostMemory*>(memory_.back().get());
    comms_.back().report = &memory->report;
    marks_.back() = &memory->marks;
    comms_.back().own_signal_pad = signal_pad(rank_id);
    std::copy_n(&signal_pads_[rank_id.line * size()], size(), comms_.back().signal_pads);
    if (sharing_) peer_offsets_[index_of(rank_id)] = std::make_unique<PeerOffsets>(device_of(rank_id), id_);
  }
}

void* Group::make_signal_pad(RankId rank_id) {
  const int device = device_of(rank_id), index = index_of(rank_id);
  if (!is_local(rank_id)) return sharing_->await_signal_pad(processes_[rank_id.line][rank_id.rank], index);
  if (!sharing_) {
    memory_.push_back(allocate_on_device(device, sizeof(SignalPad), id_));
    return memory_.back().get();
  }
  regions_.push_back(allocate_region(device, sizeof(SignalPad), local_devices(rank_id.line), id_));
  const Region region = *regions_.back();
  clear_on_device(device, region.base, sizeof(SignalPad));
  sharing_->share(region, processes_of(rank_id.line), index);
  return region.base;
}

std::vector<Marks> Group::marks() const {
  std::vector<Marks> all;
  for (const Marks* each : marks_)
    if (each) all.push_back({load_acquire(&each->begun), load_acquire(&each->ended), load_acquire(&each->call)});
  return all;
}

std::set<int> Group::processes_of(int line) const { return {processes_[line].begin(), processes_[line].end()}; }

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

void* Group::reach(RankId rank_id, int mail_index, void* data, std::size_t bytes, Comm* comm) {
  if (bytes == 0 || (!sharing_ && !staging_all_)) return data;
  std::optional<Region> region;
  if (!staging_all_) region = find_region(device_of(rank_id), data, bytes);
  if (!region) {
    region = staging(rank_id, mail_index, bytes);
    data = region->base;
  }
  if (!sharing_) return data;
  const std::vector<char*> bases = sharing_->share(*region, processes_of(rank_id.line));
  std::vector<int64_t> peer_offsets;
  for (const int process : processes_[rank_id.line]) peer_offsets.push_back(bases[process] - region->base);
  comm->peer_offsets[mail_index] = peer_offsets_.at(index_of(rank_id))->row(region->id, peer_offsets);
  return data;
}

// Grows by doubling, so that there are few sizes. The old region stays, as a captured graph may still use it.
Region Group::staging(RankId rank_id, int mail_index, std::size_t bytes) {
  std::lock_guard lock(regions_mutex_);
  if (released_) throw GroupException(closed_too_early());
  Region& region = staging_[{index_of(rank_id), mail_index}];
  if (region.bytes >= bytes) return region;
  std::size_t enough = kLeastStaging;
  while (enough < bytes) enough *= 2;
  regions_.push_back(allocate_region(device_of(rank_id), enough, local_devices(rank_id.line), id_));
  return region = *regions_.back();
}

void Group::release_regions() {
  std::lock_guard lock(regions_mutex_);
  released_ = true;
  staging_.clear();
  regions_.clear();
  if (sharing_) sharing_->unmap();
}

// On the sharing thread.
void Group::lose(int process, const std::string& why) {
  std::map<int, int> culprits;  // by line of this process
  for (int line = 0; line < line_count(); ++line)
    for (int rank = 0; rank < size(); ++rank)
      if (processes_[line][rank] == process && !local_devices(line).empty()) culprits.emplace(line, rank);
  if (culprits.empty()) return;
  const int first = culprits.begin()->second;
  fail(fatal_error(ErrorKind::peer_lost, "the process of rank ", first, " (process ", process, ") ", why));
  if (!open_) return;
  for (const auto [line, culprit] : culprits)
    for (int rank = 0; rank < size(); ++rank)
      if (is_local({line, rank})) {
        raise_abort({line, rank}, rank, culprit);
        // In place of the culprit, which writes no more.
        raise({line, rank}, &signal_pad({line, rank})->acknowledged[culprit], 1);
      }
}

void Group::give_up(RankId rank_id, GroupError error) {
  fail(std::move(error));
  for (int line = 0; line < line_count(); ++line) {
    int first = 0;  // of the ranks of this process
    while (first < size() && !is_local({line, first})) ++first;
    for (int rank = 0; first < size() && rank < size(); ++rank) {
      try {
        raise_abort({line, is_local({line, rank}) ? rank : first}, rank, line == rank_id.line ? rank_id.rank : first);
      } catch (const std::exception&) {  // then the kernel ends by its deadline
      }
    }
  }
}

void Group::raise_abort(RankId rank_id, int rank, int culprit) {
  raise(rank_id, &signal_pad({rank_id.line, rank})->abort, culprit + 1);
}

void Group::raise(RankId rank_id, uint64_t* word, uint64_t value) {
  std::shared_lock lock(regions_mutex_);
  if (sharing_ && released_) return;  // the signal pads may be another group's by now
  copy_array(device_of(rank_id), word, &value, 1);
}

std::optional<RankId> Group::find_rank_id(int ordinal) const {
  for (int line = 0; line < line_count(); ++line)
    for (int rank = 0; rank < size(); ++rank)
      if (lines_[line][rank] == ordinal) return RankId{line, rank};
  return std::nullopt;
}

void Group::close() {
  fail(closed_too_early());
  if (sharing_) sharing_->close();
}

std::string Group::state_of(RankId rank_id) const {
  if (is_local(rank_id) || local_devices(rank_id.line).empty()) return "";
  return sharing_->state_of(processes_[rank_id.line][rank_id.rank]);
}

}  // namespace jax_ep
