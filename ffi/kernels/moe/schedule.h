// How a rank's tokens are cut up: chunks, each announced to the peers by a flag of its own so that they can go on
// while later ones travel, and groups, the pieces of a chunk that one team takes at a time. Few tokens are a chunk
// each.
#pragma once

#include "comm/heap.h"
#include "comm/layout.h"

namespace jax_ep {

static_assert(kFewTokens <= kMaxFlags && kMaxChunks <= kMaxFlags);

struct Schedule {
  int tokens, chunk_tokens, chunks, group_tokens;

  // `sources`: from how many ranks groups are taken, by how many teams, so that all have work to the end of a chunk.
  JAX_EP_FN explicit Schedule(int tokens, int sources = 0, int teams = 1)
      : tokens(tokens),
        chunk_tokens(tokens <= kFewTokens ? 1 : larger(kChunkTokens, (tokens + kMaxChunks - 1) / kMaxChunks)),
        chunks(larger(1, (tokens + chunk_tokens - 1) / chunk_tokens)),
        group_tokens(larger(1, smaller(kGroupTokens, smaller(chunk_tokens, tokens) * sources / teams))) {}

  JAX_EP_FN int groups() const { return (smaller(chunk_tokens, tokens) + group_tokens - 1) / group_tokens; }
  JAX_EP_FN int chunk_of(int token) const { return token / chunk_tokens; }
  JAX_EP_FN Range chunk(int index) const { return {index * chunk_tokens, smaller((index + 1) * chunk_tokens, tokens)}; }
  JAX_EP_FN Range group(int chunk_index, int index) const {
    const Range all = chunk(chunk_index);
    return {smaller(all.begin + index * group_tokens, all.end),
            smaller(all.begin + (index + 1) * group_tokens, all.end)};
  }
};

}  // namespace jax_ep
