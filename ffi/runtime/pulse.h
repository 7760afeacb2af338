// The signs of life of another process: when it was last heard of, and how far its ranks were.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <map>
#include <string>

namespace jax_ep {

// Ops that ranks have finished, by seat: line * size + rank.
using Epochs = std::map<int, uint64_t>;

class Pulse {
 public:
  static constexpr auto kPeriod = std::chrono::seconds(1);  // of a process that is alive
  static constexpr double kSilentSeconds = 2.5;             // what more than two lost heartbeats take

  void beat() { heard_ = Clock::now(); }
  void note(int seat, uint64_t epoch) { epochs_[seat] = epoch; }

  const Epochs& epochs() const { return epochs_; }
  double seconds_silent() const { return std::chrono::duration<double>(Clock::now() - heard_).count(); }

  // Whether it is slow or dead, beside a process that is at `ours`. Ranks of one line run the same ops, so their
  // distance says how far behind it is. `size`: the ranks of a line.
  std::string describe(const Epochs& ours, int size) const {
    const double silent = seconds_silent();
    if (silent > kSilentSeconds) return "no heartbeat for " + std::to_string(static_cast<int64_t>(silent)) + " s";
    if (epochs_.empty() || ours.empty()) return "it is alive";
    int64_t behind = 0;
    for (const auto& [their_seat, their_epoch] : epochs_)
      for (const auto& [seat, epoch] : ours)
        if (their_seat / size == seat / size) behind = std::max(behind, static_cast<int64_t>(epoch - their_epoch));
    return "it is alive, " + std::to_string(behind) + (behind == 1 ? " op" : " ops") + " behind";
  }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point heard_ = Clock::now();
  Epochs epochs_;
};

}  // namespace jax_ep
