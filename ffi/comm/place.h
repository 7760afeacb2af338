// A place among several that share some work. Included by the targets, behind their function prefixes.
#pragma once

namespace jax_ep {

struct Place {
  int index;  // -1: takes no part
  int count;
};

// The first `pushers` of a block's teams push: neighbouring places are in different blocks, to spread few rows ...
JAX_EP_CONSTANT_FN Place pusher_place(int block, int blocks, int team, int pushers) {
  return {team < pushers ? team * blocks + block : -1, blocks * pushers};
}

// ... and the others fill, or all of them where there are no others.
JAX_EP_CONSTANT_FN Place filler_place(int block, int blocks, int team, int teams, int pushers) {
  const int fillers = pushers < teams ? teams - pushers : teams;
  const int first = pushers < teams ? pushers : 0;
  return {team >= first ? (team - first) * blocks + block : -1, blocks * fillers};
}

}  // namespace jax_ep
