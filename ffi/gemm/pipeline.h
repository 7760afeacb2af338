// The ring of stages, which the producer fills and the consumer warps of both CTAs of a cluster release, and the turns
// of warpgroups that ping-pong.
#pragma once

#include "gemm/layout.h"
#include "gemm/ptx/cluster.h"
#include "gemm/ptx/warps.h"

namespace jax_ep::gemm {

// A stage of the ring, and the parity of the round.
template <int kStages>
struct PipelineState {
  int stage = 0;
  uint32_t parity = 0;

  JAX_EP_FN void advance() {
    if (++stage < kStages) return;
    stage = 0;
    parity ^= 1;
  }
  JAX_EP_FN void advance(int stages) {
    stage += stages;
    parity ^= stage / kStages & 1;
    stage %= kStages;
  }
};

JAX_EP_FN void consumer_release(uint64_t* empty, int lane) {
  if (lane < kCluster) arrive_at_peer(empty, lane);
}

template <class Memory>
JAX_EP_FN void consumer_skip(Memory& shared, int stages, PipelineState<Memory::kStages>& at, int lane) {
  for (int i = 0; i < stages; ++i, at.advance()) {
    wait_barrier(&shared.full[at.stage], at.parity, "a full stage to skip");
    consumer_release(&shared.empty[at.stage], lane);
  }
}

// Waits until the peer's consumers have released every stage and write no more into this CTA's shared memory.
template <class Memory>
JAX_EP_FN void producer_tail(Memory& shared, PipelineState<Memory::kStages>& at) {
  for (int stage = 0; stage < Memory::kStages; ++stage, at.advance())
    wait_barrier(&shared.empty[at.stage], at.parity ^ 1, "the last of both CTAs' consumers");
}

// Ping-pong: a warpgroup waits for its turn to multiply, and passes the turn when its multiplies are issued.
template <bool kPingPong, class Memory>
JAX_EP_FN void await_turn(Memory& shared, int turn, int warpgroup) {
  if constexpr (kPingPong) wait_barrier(&shared.turn[warpgroup], (turn + 1 + warpgroup) & 1, "a turn");
}
template <bool kPingPong, class Memory>
JAX_EP_FN void pass_turn(Memory& shared, int warpgroup, int lane) {
  if (kPingPong && lane == 0) ptx::arrive(&shared.turn[1 - warpgroup]);
}

}  // namespace jax_ep::gemm
