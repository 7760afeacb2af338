// The layout for warps of one lane. It replaces five names of the real header.
#pragma once

#define kConsumers kHopperConsumers
#define kThreads kHopperThreads
#define kOutRows kHopperOutRows
#define kOutBytes kHopperOutBytes
#define Shared HopperShared
#include "../../../../ffi/gemm/layout.h"
#undef Shared
#undef kOutBytes
#undef kOutRows
#undef kThreads
#undef kConsumers

namespace jax_ep::gemm {

constexpr int kConsumers = kConsumerWarps, kThreads = kConsumers + 1 + kAuxWarps;
constexpr int kOutRows = kBlockM / kConsumerWarps;  // of a strip
constexpr int kMaxBlockN = 256, kOutBytes = kOutRows * kMaxBlockN * sizeof(float);

}  // namespace jax_ep::gemm
