#include "platform/gpu/launch_config.h"

namespace jax_ep {
namespace {

// Shared memory of a team: barriers, then stages. Measured on H200 by benchmarks/kernels.
constexpr int kMoveBytes = 128 + 3 * 7168;    // a ring of three pieces of a row
constexpr int kStreamBytes = 128 + 7 * 4096;  // two batches to write, five to read

// A share of the processors, and no more than there is work for.
int blocks_for(int work, int processors, int percent) {
  const int most = processors * percent / 100;
  return work < 1 ? 1 : work < most ? work : most;
}

}  // namespace

LaunchConfig launch_config(OpKind op, int num_tokens, bool encoded, int processors) {
  switch (op) {
    case OpKind::dispatch:
    case OpKind::scatter:
      if (encoded) return {blocks_for(num_tokens, processors, 50), 256, 4, kStreamBytes};
      return {blocks_for(num_tokens, processors, 50), 256, 4, kMoveBytes};
    case OpKind::combine:
      return {blocks_for(num_tokens, processors, 73), 256, 6, kStreamBytes};
    case OpKind::ragged_all_to_all:
      return {blocks_for(processors, processors, 25), 256, 8, kMoveBytes};
  }
  return {1, 256, 8, kMoveBytes};
}

}  // namespace jax_ep
