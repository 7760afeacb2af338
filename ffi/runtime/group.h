// A group as the host sees it: which device is which rank of which line, the ranks' signal pads, and errors.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <shared_mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "comm/marks.h"
#include "comm/signal_pad.h"
#include "runtime/error.h"
#include "runtime/memory.h"
#include "runtime/peer_offsets.h"
#include "runtime/sharing.h"

namespace jax_ep {

// Which rank of a group a device is: its line along the group's axis, and its rank in that line.
struct RankId {
  int line, rank;
};

// The last ops of a rank, and how long it waited for each peer.
struct RankHistory {
  RankId rank_id;
  uint64_t finished;                                // ops
  std::string process;                              // as Group::state_of says
  std::vector<OpRecord> ops;                        // the last that the rank began, in order
  std::vector<uint64_t> waited_ns, received_bytes;  // by peer
};

constexpr bool is_fatal(Failure failure) { return failure >= kFirstFatal; }

const char* name_of(OpKind op);

// The number of a call site, a text, for the flight recorder. The number of a text is the same in every process.
int32_t number_of_site(std::string_view text);
// Lets this process find the text by its number.
void remember_site(std::string_view text);
// Empty if only another process knows the number.
std::string text_of_site(int32_t number);

// "combine bfloat16 T=64 K=2 H=8192 capacity=1024 (model.py, in moe_block)". If another op made the call, the site
// names it: "sharded_lookup: model.py, step".
std::string describe_call(const Signature& signature, int32_t site);

class Group {
 public:
  // `lines` holds device ordinals in rank order, and -1 for a device of another process. If there are neighbours, the
  // constructor returns when all of them have created their part. `id`: the number of the group in programs; a later
  // group with this id may reuse the memory. Throws std::invalid_argument, std::runtime_error and GroupException.
  Group(std::vector<std::vector<int>> lines, double timeout_seconds, bool poison, Neighbours neighbours = {},
        int64_t id = 0);
  virtual ~Group() = default;

  int size() const { return static_cast<int>(lines_.front().size()); }
  int line_count() const { return static_cast<int>(lines_.size()); }
  double timeout_seconds() const { return timeout_seconds_; }
  int64_t id() const { return id_; }
  const Comm& comm(RankId rank_id) const { return comms_[index_of(rank_id)]; }
  // The signal pad of a rank, as the ranks of its line in this process see it. Null if this process has no ranks
  // in the line.
  SignalPad* signal_pad(RankId rank_id) const { return signal_pads_[index_of(rank_id)]; }

  int device_of(RankId rank_id) const { return lines_[rank_id.line][rank_id.rank]; }
  // Whether the rank's device belongs to this process.
  bool is_local(RankId rank_id) const { return device_of(rank_id) >= 0; }
  std::vector<int> local_devices(int line) const;
  std::vector<int> local_devices() const;  // of all lines

  std::optional<RankId> find_rank_id(int ordinal) const;

  // Ends the group. Later ops fail. May be called twice.
  virtual void close();

  // Keeps memory that kernels use for as long as the group.
  void keep(std::shared_ptr<void> memory) { memory_.push_back(std::move(memory)); }

  // Fails the group for good. A later failure replaces the first one only if it is nearer to the cause.
  void fail(GroupError error);
  std::optional<GroupError> failure() const;

  // Waits up to `seconds` for the group to fail or to be closed, and takes the kernels' reports. The watchdog thread
  // calls it in a loop.
  std::optional<GroupError> await_failure(double seconds);

  // The flight recorders of all ranks of the lines that have ranks in this process. Kernels may run meanwhile.
  std::vector<RankHistory> history() const;

  // The marks of a rank of this process; and of all of them, as they are now.
  Marks* marks(RankId rank_id) const { return marks_[index_of(rank_id)]; }
  std::vector<Marks> marks() const;

  // Fails the group because this rank cannot run its op, so that no peer waits until the timeout.
  void give_up(RankId rank_id, GroupError error);

  // The error for `check()`: the failure; or, once, an error that left the group usable.
  std::optional<GroupError> take_error();

  // The error that a call of an op raises before its program runs: the failure; or, once, an error that left the group
  // usable and that take_error() has not returned. Each rank of this process asks before each of its calls, in one
  // order. All ranks get an error at the same call, so no rank waits for one that raised it earlier.
  std::optional<GroupError> error_before(RankId rank_id);

  // The error that the kernel of the last op reported at this rank. Fails the group if the error is fatal.
  std::optional<GroupError> reported(RankId rank_id);

  // The address for peers of `data`, buffer `mail_index` of an op's mail: `data` itself if peers can reach it, or
  // staging. Sets the buffer's peer offsets. Throws std::runtime_error and GroupException.
  void* reach(RankId rank_id, int mail_index, void* data, std::size_t bytes, Comm* comm);

  // How the process of another rank is, for the text of an error. Empty for a rank of this process. Does not block.
  std::string state_of(RankId rank_id) const;

  // Test hook: from now on everything goes through staging.
  void stage_all() { staging_all_ = true; }

 protected:
  // Frees the memory that processes share. Called when the group is closed and no thread of this process uses the
  // memory.
  void release_regions();

  // Tells the kernels of `rank` that the group has failed because `culprit` did not answer, through a device that
  // reaches the signal pad of `rank`: the device of `rank_id`.
  void raise_abort(RankId rank_id, int rank, int culprit);

 private:
  int index_of(RankId rank_id) const { return rank_id.line * size() + rank_id.rank; }
  void open_line(int line, bool poison);
  void* make_signal_pad(RankId rank_id);
  std::set<int> processes_of(int line) const;
  Region staging(RankId rank_id, int mail_index, std::size_t bytes);
  // Sets a word of a signal pad that the device of `rank_id` reaches.
  void raise(RankId rank_id, uint64_t* word, uint64_t value);
  void lose(int process, const std::string& why);

  // Errors (group_errors.cc).
  std::optional<GroupError> take_failures();
  // The last report of a rank of this process, as a copy; none while it is being written.
  struct RankReport {
    int line;
    Report report;
  };
  std::optional<RankReport> report_of(int index) const;
  std::vector<RankReport> reports(bool fatal, const std::vector<uint64_t>& taken) const;
  // The error of an op later than the epochs `taken`, which are by line.
  std::optional<GroupError> take_recoverable(std::vector<uint64_t>* taken);
  GroupError describe(const RankReport& reported) const;
  std::optional<OpRecord> record(int line, int rank, uint64_t epoch) const;
  std::string describe_op(int line, int rank, uint64_t epoch, const char* otherwise) const;
  std::string called_op(int line, const Report& report) const;
  std::optional<std::pair<int, int>> differing_ranks(int line, const Report& report) const;
  GroupError mismatch(int line, const Report& report, int rank, int other) const;
  int silent_rank(int line, const Report& report) const;
  std::string progress(int line, int rank, uint64_t epoch) const;
  struct SeenSignalPad {
    const SignalPad* signal_pad = nullptr;
    int device = -1;  // of this process, that reaches it
  };
  SeenSignalPad signal_pad_of(int line, int rank) const;

  const std::vector<std::vector<int>> lines_;
  const double timeout_seconds_;
  const std::vector<std::vector<int>> processes_;
  const int64_t id_;
  std::vector<std::shared_ptr<void>> memory_;
  std::vector<SignalPad*> signal_pads_;  // by rank index
  std::vector<Comm> comms_;
  std::vector<Marks*> marks_;  // by rank index; null of other processes
  mutable std::mutex mutex_;
  std::condition_variable failed_;
  std::optional<GroupError> failure_;
  std::mutex reports_mutex_;  // guards the members below
  // By line: the epochs of the errors that take_error() and error_before() have returned. An error of one op is one
  // error of all its ranks.
  std::vector<uint64_t> epochs_taken_, epochs_raised_;
  std::vector<uint64_t> calls_asked_;             // by rank index
  uint64_t calls_decided_ = 0;                    // the first rank that asks decides for all
  std::map<uint64_t, GroupError> calls_refused_;  // by call, until all ranks have asked
  std::atomic<bool> open_ = false;
  std::atomic<bool> staging_all_ = false;
  mutable std::shared_mutex regions_mutex_;
  bool released_ = false;
  std::vector<std::shared_ptr<const Region>> regions_;        // signal pads, and all staging of the group's life
  std::map<std::pair<int, int>, Region> staging_;             // by rank index and index in the mail
  std::map<int, std::unique_ptr<PeerOffsets>> peer_offsets_;  // by own rank index, if there are other processes
  std::unique_ptr<Sharing> sharing_;                          // none in a group of one process
};

}  // namespace jax_ep
