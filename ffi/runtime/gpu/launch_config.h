// The launch of an op: a pure function of its shapes and of the device, measured, not derived.
#pragma once

#include "kernels/moe/args.h"

namespace jax_ep {

// What a launch may take.
struct Budget {
  int blocks;        // a block takes a whole processor
  int shared_bytes;  // of a block
};

// Few blocks: they wait for peers, and other kernels must find room beside them. In each, the first teams push rows to
// peers while the others take in what arrives.
struct LaunchConfig {
  int blocks;
  int threads;
  int pushers_per_block;
  int team_bytes;  // of shared memory, for each warp's stages
};

// What measures best and leaves room for the kernels of XLA's own collectives.
int default_blocks(int processors);

// `encoded`: rows travel in float8.
LaunchConfig launch_config(OpKind op, int ranks, int num_tokens, bool encoded, Budget budget);

}  // namespace jax_ep
