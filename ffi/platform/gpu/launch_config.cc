#include "platform/gpu/launch_config.h"

namespace jax_ep {
namespace {

constexpr int kStageBytes = 128 + 3 * 7168;  // a ring of three pieces and its barriers

}  // namespace

LaunchConfig launch_config(OpKind op, int num_tokens, int processors) {
  const int most = processors / 4;
  const int wanted = op == OpKind::ragged_all_to_all ? most : (num_tokens + 7) / 8;
  const int blocks = wanted < 1 ? 1 : wanted < most ? wanted : most;
  switch (op) {
    case OpKind::dispatch:
    case OpKind::scatter:
      return {blocks, 256, 4, kStageBytes};
    case OpKind::combine:
      return {blocks, 512, 12, 0};
    case OpKind::ragged_all_to_all:
      return {blocks, 256, 8, kStageBytes};
  }
  return {blocks, 256, 8, 0};
}

}  // namespace jax_ep
