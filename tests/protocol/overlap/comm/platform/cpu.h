// The CPU's platform with CTAs, whose warps are threads of one lane: comm/platform.h includes this in place of the
// CPU's own header. Coop is replaced. Indices, named barriers and __syncwarp are new.
#pragma once

#include <condition_variable>
#include <map>
#include <mutex>

#define Coop ThreadCoop
#include "../../../../../ffi/comm/platform/cpu.h"
#undef Coop

namespace jax_ep {

struct Index {
  int x = 0;
};
inline thread_local Index threadIdx, blockIdx, gridDim;

// The named barriers of a CTA.
class CtaBarriers {
 public:
  void sync(int name, int threads) {
    std::unique_lock lock(mutex_);
    Barrier& barrier = barriers_[name];
    const int round = barrier.round;
    if (++barrier.arrived == threads) {
      barrier = {0, round + 1};
      changed_.notify_all();
    } else {
      changed_.wait(lock, [&] { return barrier.round != round; });
    }
  }

 private:
  struct Barrier {
    int arrived = 0, round = 0;
  };
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<int, Barrier> barriers_;
};
inline thread_local CtaBarriers* cta_barriers = nullptr;

struct Coop : ThreadCoop {
  Coop(int index, int count, Part sender, Part receiver, Part cta, Part in_cta, int /*lane*/, char* /*shared*/,
       int /*shared_bytes*/, TrackRole, int barrier)
      : ThreadCoop({index, count}, sender, receiver), in_cta(in_cta), barrier_(barrier) {
    this->cta = cta;
  }

  Part in_cta;

  void cta_sync() const { cta_barriers->sync(barrier_, in_cta.count); }

 private:
  int barrier_;
};

JAX_EP_FN void __syncwarp() {}

}  // namespace jax_ep
