// Many iterations of a small op with ranks late at random: nothing hangs, and every sum is right every time.
#pragma once

#include <random>

#include "overlap_bench.h"

// Counts values that are not as they should be, and spoils what the next op must write anew.
__global__ void compare_and_spoil(const uint32_t* expected, uint32_t* result, uint32_t* partial, int64_t words,
                                  unsigned long long* wrong) {
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (i >= words) return;
  if (result[i] != expected[i]) atomicAdd(wrong, 1ull);
  result[i] = partial[i] = 0xffffffff;
}

// Runs `iterations` ops, launched by enqueue(rank, set) on operands of a few sets in turns, each rank late by up to
// `most_ns` before each. `expected` has, by rank and set, what the result is. Returns the number of wrong values.
template <class Enqueue>
int64_t stress(const std::vector<Rank>& ranks, const std::vector<std::vector<uint32_t*>>& expected, int64_t words,
               int iterations, int most_ns, Enqueue enqueue) {
  constexpr int kOps = 500;
  const int count = ranks.size(), sets = expected[0].size();
  std::vector<cudaGraphExec_t> graphs(count);
  std::vector<unsigned long long*> wrong(count);
  for (int r = 0; r < count; ++r) {
    CHECK(cudaSetDevice(r));
    wrong[r] = device_array<unsigned long long>(1);
    CHECK(cudaMemset(wrong[r], 0, sizeof(*wrong[r])));
    std::mt19937 random(r);
    cudaGraph_t graph;
    CHECK(cudaStreamBeginCapture(ranks[r].stream, cudaStreamCaptureModeThreadLocal));
    for (int op = 0; op < kOps; ++op) {
      delay<<<1, 1, 0, ranks[r].stream>>>(random() % most_ns);
      enqueue(r, op % sets);
      compare_and_spoil<<<blocks_of(words), 256, 0, ranks[r].stream>>>(
          expected[r][op % sets], reinterpret_cast<uint32_t*>(ranks[r].result),
          reinterpret_cast<uint32_t*>(ranks[r].partial), words, wrong[r]);
    }
    CHECK(cudaStreamEndCapture(ranks[r].stream, &graph));
    CHECK(cudaGraphInstantiate(&graphs[r], graph, 0));
    CHECK(cudaGraphDestroy(graph));
  }
  for (int done = 0; done < iterations; done += kOps)
    for (int r = 0; r < count; ++r) {
      CHECK(cudaSetDevice(r));
      CHECK(cudaGraphLaunch(graphs[r], ranks[r].stream));
    }
  int64_t total = 0;
  for (int r = 0; r < count; ++r) {
    CHECK(cudaSetDevice(r));
    CHECK(cudaStreamSynchronize(ranks[r].stream));
    unsigned long long mine = 0;
    CHECK(cudaMemcpy(&mine, wrong[r], sizeof(mine), cudaMemcpyDefault));
    total += static_cast<int64_t>(mine);
    CHECK(cudaFree(wrong[r]));
    CHECK(cudaGraphExecDestroy(graphs[r]));
  }
  return total;
}
