// The launch of an op: a pure function of its shapes and of the device, measured, not derived.
#pragma once

#include "kernels/args.h"

namespace jax_ep {

// Few blocks: they wait for peers, and other kernels must find room beside them. In each, the first teams push rows to
// peers while the others take in what arrives.
struct LaunchConfig {
  int blocks;
  int threads;
  int pushers_per_block;
  int team_bytes;  // of shared memory, for each warp's stages
};

// `encoded`: rows travel in float8.
LaunchConfig launch_config(OpKind op, int num_tokens, bool encoded, int processors);

}  // namespace jax_ep
