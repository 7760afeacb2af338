// A kernel that holds all SMs of some GPUs but one or a pair, as a long one of somebody else does.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <vector>

#include "check.h"

// Takes pairs of SMs, as clusters do, so that the pair that is left can run one.
__global__ void __cluster_dims__(2, 1, 1) hold_sms(uint64_t ns) {
  extern __shared__ char memory[];
  memory[threadIdx.x] = 0;
  wait_ns(ns);
}

enum class Free { one, pair };

// Holds them from now on, on devices 0, 1, ...; ends when the kernels do.
class HeldSms {
 public:
  HeldSms(int devices, Free free, uint64_t ns) : streams_(devices) {
    constexpr int kSharedBytes = 227 * 1024;  // of a whole SM
    void (*const hold)(uint64_t) = free == Free::one ? delay : hold_sms;
    on_each(devices, [&](int device) {
      int sms = 0;
      CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
      CHECK(cudaFuncSetAttribute(hold, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
      CHECK(cudaStreamCreateWithFlags(&streams_[device], cudaStreamNonBlocking));
      hold<<<free == Free::one ? sms - 1 : sms / 2 * 2 - 2, 1, kSharedBytes, streams_[device]>>>(ns);
      CHECK(cudaGetLastError());
    });
  }
  ~HeldSms() {
    on_each(streams_.size(), [&](int device) {
      CHECK(cudaStreamSynchronize(streams_[device]));
      CHECK(cudaStreamDestroy(streams_[device]));
    });
  }

  bool all_held() {
    bool held = true;
    on_each(streams_.size(), [&](int device) { held &= cudaStreamQuery(streams_[device]) == cudaErrorNotReady; });
    return held;
  }

 private:
  std::vector<cudaStream_t> streams_;
};
