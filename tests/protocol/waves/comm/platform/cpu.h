// A CPU whose coops have 64 lanes, as those of AMD GPUs: comm/platform.h includes this in place of the
// CPU's own header. Everything but Coop is that header's.
//
// The lanes of a coop take turns on one thread, each with a stack of its own. A lane gives up its turn where all lanes
// meet and where it waits for a flag. Lanes go on from a meeting in another order than they came from the one before:
// what one lane leaves for another without a meeting is missed.
// A coop whose lanes part, so that some meet where others do not, ends the test.
#pragma once

#include <unistd.h>  // has a pause() of its own

#include <chrono>
#include <thread>

#define JAX_EP_WAVES
#define Coop ThreadCoop
#define pause thread_pause
#define kLanePacks kThreadLanePacks
#define kRowPacks kThreadRowPacks
#include "../../../../../ffi/comm/platform/cpu.h"
#undef kRowPacks
#undef kLanePacks
#undef pause
#undef Coop

#include <pthread.h>
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

namespace jax_ep {

constexpr int kLanePacks = 4, kRowPacks = 4;  // as in hip.h
constexpr int kLanes = 64, kValueBytes = 32;

// What each lane of a coop has handed in.
template <class V>
struct LaneValues {
  const char* bytes;

  V operator[](int lane) const {
    V value;
    std::memcpy(&value, bytes + (lane & (kLanes - 1)) * kValueBytes, sizeof(V));
    return value;
  }
};

// Runs one function on 64 lanes.
class Wave {
 public:
  explicit Wave(const std::function<void(int lane)>& body) : body_(body) {
    for (int lane = 0; lane < kLanes; ++lane) {
      getcontext(&contexts_[lane]);
      contexts_[lane].uc_stack = {stacks_.get() + lane * kStackBytes, 0, kStackBytes};
      contexts_[lane].uc_link = &outside_;
      const auto self = reinterpret_cast<uintptr_t>(this);
      makecontext(&contexts_[lane], reinterpret_cast<void (*)()>(&Wave::enter), 3, static_cast<unsigned>(self >> 32),
                  static_cast<unsigned>(self), lane);
    }
  }

  // Where lanes meet, they pass the turn on by themselves; a lane that ends comes back here.
  void run() {
    for (int lane = 0; lane < kLanes; ++lane)
      while (!done_[lane]) swapcontext(&outside_, &contexts_[lane_ = lane]);
  }

  // A lane waits for a flag.
  void pass() {
    if (!ended_) next(lane_);
  }

  // All lanes call, with `call` the same. Returns the values of all, until the next call but one.
  template <class V>
  LaneValues<V> meet(char call, const V& value) {
    static_assert(sizeof(V) <= kValueBytes);
    const int lane = lane_;
    char* const values = values_[round_ % 2];
    if (arrived_ && call != call_) diverged();
    call_ = call;
    std::memcpy(values + lane * kValueBytes, &value, sizeof(V));
    if (++arrived_ == kLanes) {
      arrived_ = 0;
      ++round_;
    } else {
      for (const uint64_t mine = round_; round_ == mine; next(lane))
        if (ended_) diverged();
    }
    return {values};
  }

 private:
  static void enter(unsigned high, unsigned low, int lane) {
    Wave* const self = reinterpret_cast<Wave*>(static_cast<uintptr_t>(high) << 32 | low);
    self->body_(lane);
    self->done_[lane] = true;
    if (self->arrived_) self->diverged();
    ++self->ended_;
  }

  // Another lane's turn. The order is reversed at every meeting.
  void next(int lane) {
    lane_ = (lane + (round_ % 2 ? 1 : kLanes - 1)) % kLanes;
    swapcontext(&contexts_[lane], &contexts_[lane_]);
  }

  [[noreturn]] void diverged() const {
    std::fprintf(stderr, "lane %d: the lanes of a coop have parted, at '%c'\n", lane_, call_);
    std::abort();
  }

  static constexpr int kStackBytes = 256 << 10;
  const std::function<void(int lane)>& body_;
  std::unique_ptr<char[]> stacks_{new char[kLanes * kStackBytes]};
  ucontext_t outside_, contexts_[kLanes];
  bool done_[kLanes] = {};
  char values_[2][kLanes * kValueBytes];
  char call_ = 0;
  int lane_ = 0, arrived_ = 0, ended_ = 0;
  uint64_t round_ = 0;
};

inline thread_local Wave* running_wave = nullptr;

inline void pause(unsigned tries) {
  if (running_wave) running_wave->pass();
  thread_pause(tries);
}

// What the coops of a CTA share.
struct Cta {
  explicit Cta(int coops) : memory(coops * kCoopBytes, '\xff') { pthread_barrier_init(&barrier, nullptr, coops); }
  ~Cta() { pthread_barrier_destroy(&barrier); }

  static constexpr int kCoopBytes = 4096;
  pthread_barrier_t barrier;
  std::vector<char> memory;
};

struct Coop {
  explicit Coop(Part all = {0, 1}) : index(all.index), count(all.count) {}

  int index;
  int count;
  Part sender, receiver;
  Part cta, in_cta;
  int lane = 0;
  char* shared = nullptr;
  int shared_bytes = 0;
  TrackRole track = TrackRole::none;
  Wave* wave = nullptr;
  pthread_barrier_t* of_cta = nullptr;
  static constexpr int lanes = kLanes;

  void sync() const { wave->meet('s', 0); }
  void cta_sync() const {
    wave->meet('c', 0);
    if (lane == 0) pthread_barrier_wait(of_cta);
    wave->meet('c', 0);
  }
  int broadcast(int value) const { return wave->meet('b', value)[0]; }
  uint64_t ballot(bool value) const {
    return reduce<uint64_t>(wave->meet('v', value),
                            [](uint64_t bits, int i, bool set) { return bits | uint64_t{set} << i; });
  }
  template <class V>
  V from_lane(V value, int source) const {
    return wave->meet('f', value)[source];
  }
  Match match(int value) const {
    const auto values = wave->meet('m', value);
    Match found{0, 0};
    for (int i = 0; i < lanes; ++i) {
      const bool same = values[i] == value;
      found.total += same;
      found.below += same && i < lane;
    }
    return found;
  }
  int sum(int value) const {
    return reduce<int>(wave->meet('+', value), [](int sum, int, int each) { return sum + each; });
  }
  uint32_t max(uint32_t value, int width) const {
    const int first = lane / width * width;
    return reduce<uint32_t>(wave->meet('>', value), [&](uint32_t most, int i, uint32_t each) {
      return i >= first && i < first + width && each > most ? each : most;
    });
  }
  int exclusive_scan(int value, int* total) const {
    const auto values = wave->meet('x', value);
    *total = reduce<int>(values, [](int sum, int, int each) { return sum + each; });
    return reduce<int>(values, [&](int sum, int i, int each) { return i < lane ? sum + each : sum; });
  }

 private:
  template <class R, class V, class Fold>
  static R reduce(LaneValues<V> values, Fold fold) {
    R result = 0;
    for (int i = 0; i < lanes; ++i) result = fold(result, i, values[i]);
    return result;
  }
};

inline Coop coop_of(Part cta, Part in_cta, int senders, Cta& own) {
  Coop coop({cta.index * in_cta.count + in_cta.index, cta.count * in_cta.count});
  coop.sender = sender_part(cta.index, cta.count, in_cta.index, senders);
  coop.receiver = receiver_part(cta.index, cta.count, in_cta.index, in_cta.count, senders);
  coop.cta = cta, coop.in_cta = in_cta;
  coop.shared = own.memory.data() + in_cta.index * Cta::kCoopBytes, coop.shared_bytes = Cta::kCoopBytes;
  coop.track = track_of(in_cta.index, senders), coop.of_cta = &own.barrier;
  return coop;
}

// Calls body(coop) on every lane of a coop.
template <class Body>
void on_all_lanes(Coop coop, Body body) {
  const std::function<void(int)> of_lane = [&](int lane) {
    Coop mine = coop;
    mine.lane = lane;
    mine.wave = running_wave;
    body(mine);
  };
  Wave wave(of_lane);
  running_wave = &wave;
  wave.run();
  running_wave = nullptr;
}

}  // namespace jax_ep
