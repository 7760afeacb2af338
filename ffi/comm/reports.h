// An op's reports to the host: failures, and its record in the flight recorder.
#pragma once

#include <cstddef>
#include <cstring>

#include "comm/platform.h"
#include "comm/signal_pad.h"
#include "comm/spin.h"

namespace jax_ep {

// Leaves a report for the host, unless this op or a later one has left one. The host may read at any time: the epoch is
// zero until the rest is written, in the order of the stores.
JAX_EP_COLD_FN void leave_report(SignalPad* signal_pad, Report* to, Report what) {
  const uint64_t before = load_relaxed(&signal_pad->reported);
  if (before >= what.epoch || !compare_exchange(&signal_pad->reported, before, what.epoch)) return;
  constexpr int kWords = sizeof(Report) / sizeof(uint64_t);
  uint64_t words[kWords];
  memcpy(words, &what, sizeof(what));
  auto* const there = reinterpret_cast<uint64_t*>(to);
  static_assert(offsetof(Report, epoch) == 0);
  store_relaxed(&there[0], uint64_t{0});
  for (int i = 1; i < kWords; ++i) store_release(&there[i], words[i]);
  store_release(&there[0], words[0]);
}

// Whether the latest report of a rank says that the group has failed.
JAX_EP_COLD_FN bool has_reported_failure(const Report* report) {
  return load_acquire(&report->epoch) != 0 && report->failure >= kFirstFatal;
}

// Leaves a report of a wait that failed. After a timeout or a mismatch, also sets the abort word, if it is zero, to 1 +
// the rank that was waited for.
JAX_EP_COLD_FN void report_failed_wait(SignalPad* signal_pad, Report* to, Status status, Report what) {
  const bool aborted = status == Status::aborted;
  what.failure = aborted ? Failure::peer_lost : status == Status::timeout ? Failure::timeout : Failure::mismatch;
  if (aborted) what.peer = static_cast<int>(load_relaxed(&signal_pad->abort)) - 1;
  leave_report(signal_pad, to, what);  // before others of this rank see the abort word
  if (!aborted) compare_exchange(&signal_pad->abort, uint64_t{0}, static_cast<uint64_t>(what.peer) + 1);
}

// Writes the record of an op that begins, word by word, because the host may read at any time. Inlined, because a call
// this early would cost the kernel registers.
JAX_EP_FN void write_record(OpRecord* record, uint64_t epoch, int32_t site, const Signature& signature) {
  constexpr int kWords = sizeof(OpRecord) / sizeof(uint64_t);
  const OpRecord begun{epoch, clock_ns(), 0, 0, static_cast<uint64_t>(site), signature};
  uint64_t words[kWords];
  memcpy(words, &begun, sizeof(begun));
  for (int i = 0; i < kWords; ++i) store_relaxed(reinterpret_cast<uint64_t*>(record) + i, words[i]);
}

JAX_EP_COLD_FN void add_wait(uint64_t* sum, uint64_t ns) { fetch_add(sum, ns); }

}  // namespace jax_ep
