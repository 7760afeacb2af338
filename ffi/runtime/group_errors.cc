// The errors of a group, and the last ops of its ranks.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>

#include "kernels/signature.h"
#include "runtime/group.h"

namespace jax_ep {
namespace {

// How near an error is to the cause of a failure. An error that names the silent rank says more than one of a rank that
// gave up. The error of a closed group is never replaced.
int nearness(const GroupError& error) {
  if (error.kind == ErrorKind::peer_lost) return 1;
  if (error.kind == ErrorKind::peer_timeout) return 2;
  return error.kind == ErrorKind::group_closed ? 0 : 3;
}

struct Sites {
  std::mutex mutex;
  std::map<int32_t, std::string> texts;
};

Sites& sites() {
  static auto* const sites = new Sites;  // never destroyed, as programs may still run at exit
  return *sites;
}

}  // namespace

int32_t number_of_site(std::string_view text) {
  return static_cast<int32_t>(hash_of(text.data(), text.size()) & 0x7fffffff);
}

void remember_site(std::string_view text) {
  std::lock_guard lock(sites().mutex);
  sites().texts.emplace(number_of_site(text), text);
}

std::string text_of_site(int32_t number) {
  std::lock_guard lock(sites().mutex);
  const auto found = sites().texts.find(number);
  return found == sites().texts.end() ? "" : found->second;
}

std::string describe_call(const Signature& signature, int32_t site) {
  const std::string text = text_of_site(site);
  return describe(signature) + (text.empty() ? "" : " (" + text + ")");
}

void Group::fail(GroupError error) {
  {
    std::lock_guard lock(mutex_);
    const bool closed = failure_ && failure_->kind == ErrorKind::group_closed;
    if (!failure_ || (!closed && nearness(error) > nearness(*failure_))) failure_ = std::move(error);
  }
  failed_.notify_all();
}

std::optional<GroupError> Group::failure() const {
  std::lock_guard lock(mutex_);
  return failure_;
}

std::optional<GroupError> Group::await_failure(double seconds) {
  {
    std::unique_lock lock(mutex_);
    failed_.wait_for(lock, std::chrono::duration<double>(seconds), [this] { return failure_.has_value(); });
  }
  return take_failures();
}

// Fails the group if its kernels reported a failure: by the report that is nearest to the cause.
std::optional<GroupError> Group::take_failures() {
  for (const RankReport& each : reports(/*fatal=*/true, std::vector<uint64_t>(line_count()))) fail(describe(each));
  return failure();
}

std::optional<Group::RankReport> Group::report_of(int index) const {
  const Report* const from = comms_[index].report;
  if (!from || load_acquire(&from->epoch) == 0) return std::nullopt;  // of another process, or no report
  constexpr int kWords = sizeof(Report) / sizeof(uint64_t);
  const auto* const there = reinterpret_cast<const uint64_t*>(from);
  uint64_t words[kWords];
  for (int i = 0; i < kWords; ++i) words[i] = load_acquire(&there[i]);
  if (words[0] == 0 || load_acquire(&there[0]) != words[0]) return std::nullopt;
  RankReport found{index / size(), {}};
  std::memcpy(&found.report, words, sizeof(words));
  return found;
}

// The reports of this process' kernels, of ops later than `taken`, which is by line.
std::vector<Group::RankReport> Group::reports(bool fatal, const std::vector<uint64_t>& taken) const {
  std::vector<RankReport> found;
  for (std::size_t i = 0; i < comms_.size(); ++i) {
    const std::optional<RankReport> each = report_of(static_cast<int>(i));
    if (each && each->report.epoch > taken[each->line] && is_fatal(each->report.failure) == fatal)
      found.push_back(*each);
  }
  return found;
}

// The caller holds reports_mutex_.
std::optional<GroupError> Group::take_recoverable(std::vector<uint64_t>* taken) {
  std::optional<GroupError> recoverable;
  bool hearsay = false;  // whether the error only says that another rank has one
  std::vector<uint64_t> latest = *taken;
  for (const RankReport& each : reports(/*fatal=*/false, *taken)) {
    const auto& [line, report] = each;
    latest[line] = std::max(latest[line], report.epoch);
    if (recoverable && !hearsay) continue;
    recoverable = describe(each);
    hearsay = report.failure == Failure::invalid && report.detail == kElsewhere;
  }
  *taken = latest;
  return recoverable;
}

std::optional<GroupError> Group::take_error() {
  if (std::optional<GroupError> failed = take_failures()) return failed;
  std::lock_guard lock(reports_mutex_);
  std::optional<GroupError> recoverable = take_recoverable(&epochs_taken_);
  for (int line = 0; line < line_count(); ++line)  // error_before() does not return it again
    epochs_raised_[line] = std::max(epochs_raised_[line], epochs_taken_[line]);
  return recoverable;
}

std::optional<GroupError> Group::error_before(RankId rank_id) {
  if (std::optional<GroupError> failed = failure()) return failed;
  if (std::optional<GroupError> failed = take_failures()) return failed;
  std::lock_guard lock(reports_mutex_);
  const uint64_t call = ++calls_asked_[index_of(rank_id)];
  if (call > calls_decided_) {
    calls_decided_ = call;
    if (std::optional<GroupError> error = take_recoverable(&epochs_raised_)) calls_refused_.emplace(call, *error);
  }
  if (calls_refused_.empty()) return std::nullopt;
  const auto refused = calls_refused_.find(call);
  std::optional<GroupError> error;
  if (refused != calls_refused_.end()) error = refused->second;
  uint64_t asked_by_all = call;
  for (std::size_t i = 0; i < calls_asked_.size(); ++i)
    if (comms_[i].report) asked_by_all = std::min(asked_by_all, calls_asked_[i]);
  calls_refused_.erase(calls_refused_.begin(), calls_refused_.upper_bound(asked_by_all));
  return error;
}

std::optional<GroupError> Group::reported(RankId rank_id) {
  const std::optional<RankReport> mine = report_of(index_of(rank_id));
  if (!mine || mine->report.epoch != signal_pad(rank_id)->epoch) return std::nullopt;
  if (!is_fatal(mine->report.failure)) return describe(*mine);
  return take_failures();  // another rank may know more
}

std::vector<RankHistory> Group::history() const {
  std::shared_lock lock(regions_mutex_);
  std::vector<RankHistory> all;
  for (int line = 0; line < line_count(); ++line)
    for (int rank = 0; rank < size(); ++rank) {
      const auto [signal_pad, device] = signal_pad_of(line, rank);
      if (!signal_pad) continue;
      const std::vector<uint64_t> zeros(size());
      RankHistory found{{line, rank}, 0, state_of({line, rank}), std::vector<OpRecord>(kRecordedOps), zeros, zeros};
      copy_array(device, &found.finished, &signal_pad->epoch, 1);
      copy_array(device, found.waited_ns.data(), signal_pad->waited_ns, size());
      uint64_t counted[kCounters][kMaxRanks];
      copy_array(device, counted, signal_pad->received_bytes, kCounters);
      for (const auto& counters : counted)
        for (int peer = 0; peer < size(); ++peer) found.received_bytes[peer] += counters[peer];
      copy_array(device, found.ops.data(), signal_pad->ops, kRecordedOps);
      const auto unused = [](const OpRecord& op) { return op.epoch == 0; };
      found.ops.erase(std::remove_if(found.ops.begin(), found.ops.end(), unused), found.ops.end());
      std::sort(found.ops.begin(), found.ops.end(), [](const auto& a, const auto& b) { return a.epoch < b.epoch; });
      all.push_back(std::move(found));
    }
  return all;
}

// A signal pad as this process sees it, if it has ranks of the line and still maps the pad. The caller holds the lock
// while it reads the pad.
Group::SeenSignalPad Group::signal_pad_of(int line, int rank) const {
  if (sharing_ && released_) return {};
  for (int here = is_local({line, rank}) ? rank : 0; here < size(); ++here)
    if (is_local({line, here})) return {signal_pad({line, rank}), device_of({line, here})};
  return {};
}

// The record of an op of a rank. None if the rank has not begun it, or if its memory cannot be read: an error is
// reported without it.
std::optional<OpRecord> Group::record(int line, int rank, uint64_t epoch) const try {
  std::shared_lock lock(regions_mutex_);
  const auto [signal_pad, device] = signal_pad_of(line, rank);
  if (!signal_pad) return std::nullopt;
  OpRecord found{};
  copy_array(device, &found, &signal_pad->ops[epoch % kRecordedOps], 1);
  return found.epoch == epoch ? std::optional(found) : std::nullopt;
} catch (const std::runtime_error&) {
  return std::nullopt;
}

std::string Group::describe_op(int line, int rank, uint64_t epoch, const char* otherwise) const {
  const std::optional<OpRecord> op = record(line, rank, epoch);
  if (!op) return otherwise;
  return describe_call(op->signature, static_cast<int32_t>(op->site));
}

// The rank that caused a timeout: one that has not begun the op, rather than one that waits for it.
int Group::silent_rank(int line, const Report& report) const {
  if (!record(line, report.peer, report.epoch)) return report.peer;
  for (int rank = 0; rank < size(); ++rank)
    if (!record(line, rank, report.epoch)) return rank;
  return report.peer;
}

std::string Group::progress(int line, int rank, uint64_t epoch) const {
  const std::string state = state_of({line, rank}), process = state.empty() ? "" : "; " + state;
  if (const auto begun = record(line, rank, epoch))
    return (begun->outcome == static_cast<uint64_t>(Outcome::running) ? "it is in this op" : "it has left this op") +
           process;
  const std::string last = epoch > 1 ? describe_op(line, rank, epoch - 1, "") : "";
  return "it has not begun this op" + (last.empty() ? "" : "; its last was " + last) + process;
}

// Two ranks that called different things in the op of the report, if there are. The first is the rank of the report, or
// any other if that rank began when the group had failed: then it has no record.
std::optional<std::pair<int, int>> Group::differing_ranks(int line, const Report& report) const {
  int first = report.rank;
  std::optional<OpRecord> known = record(line, first, report.epoch);
  for (int rank = 0; rank < size(); ++rank) {
    const std::optional<OpRecord> other = record(line, rank, report.epoch);
    if (!other) continue;
    if (!known) {
      first = rank;
      known = other;
    }
    if (std::memcmp(&other->signature, &known->signature, sizeof(Signature)) != 0) return {{first, rank}};
  }
  return std::nullopt;
}

GroupError Group::mismatch(int line, const Report& report, int rank, int other) const {
  return fatal_error(ErrorKind::mismatch, describe_op(line, rank, report.epoch, name_of(report.op)), " at rank ", rank,
                     ", but ", describe_op(line, other, report.epoch, "another op"), " at rank ", other,
                     ": all ranks must run the same ops with the same shapes in one order");
}

// The op that a user called: the one that the call site names, or that of the report.
std::string Group::called_op(int line, const Report& report) const {
  const std::optional<OpRecord> op = record(line, report.rank, report.epoch);
  const std::string site = op ? text_of_site(static_cast<int32_t>(op->site)) : "";
  const size_t end = site.find(": ");
  return end == std::string::npos ? name_of(report.op) : site.substr(0, end);
}

GroupError Group::describe(const RankReport& reported) const {
  const auto& [line, report] = reported;
  const int rank = report.rank, peer = report.peer;
  if (is_fatal(report.failure))  // whatever this rank saw of it first
    if (const auto ranks = differing_ranks(line, report)) return mismatch(line, report, ranks->first, ranks->second);
  const std::string op =
      is_fatal(report.failure) ? describe_op(line, rank, report.epoch, name_of(report.op)) : called_op(line, report);
  switch (report.failure) {
    case Failure::timeout: {
      const int culprit = silent_rank(line, report);
      return fatal_error(ErrorKind::peer_timeout, op, ": rank ", rank, " waited ", timeout_seconds_, " s for rank ",
                         culprit, " in vain: ", progress(line, culprit, report.epoch));
    }
    case Failure::peer_lost:
      if (peer == rank)
        return fatal_error(ErrorKind::peer_lost, op, ": the peers of rank ", rank, " gave up, as it did not answer");
      return fatal_error(ErrorKind::peer_lost, op, ": rank ", rank, " gave up because rank ", peer, " did not answer");
    case Failure::mismatch:
      return mismatch(line, report, rank, peer);
    case Failure::capacity:
      return {ErrorKind::capacity, concat(op, ": rank ", rank, " needs ", report.seen, " rows but capacity is ",
                                          report.expected, "; raise the capacity or pass on_overflow='drop'")};
    case Failure::invalid:
      return {ErrorKind::invalid_routing, concat(op, ": rank ", rank, ": ", describe_invalid(report))};
    case Failure::none:
      break;
  }
  return {ErrorKind::other, "an op failed without a reason"};
}

}  // namespace jax_ep
