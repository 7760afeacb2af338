// Times of ops inside CUDA graphs, all ranks at once. A rank has a device and a stream.
#pragma once

#include <algorithm>
#include <vector>

#include "check.h"

constexpr int kOpsPerGraph = 20;

template <class Rank>
void synchronize(const std::vector<Rank>& ranks) {
  for (const Rank& rank : ranks) {
    CHECK(cudaSetDevice(rank.device));
    CHECK(cudaStreamSynchronize(rank.stream));
  }
}

// Microseconds of what enqueue(rank) enqueues: the median over graphs of the slowest rank's time.
template <class Rank, class Enqueue>
double time_graphs(const std::vector<Rank>& ranks, Enqueue enqueue) {
  const size_t n = ranks.size();
  std::vector<cudaGraphExec_t> graphs(n);
  std::vector<cudaEvent_t> begin(n), end(n);
  for (size_t i = 0; i < n; ++i) {
    CHECK(cudaSetDevice(ranks[i].device));
    CHECK(cudaEventCreate(&begin[i]));
    CHECK(cudaEventCreate(&end[i]));
    cudaGraph_t graph;
    CHECK(cudaStreamBeginCapture(ranks[i].stream, cudaStreamCaptureModeThreadLocal));
    for (int op = 0; op < kOpsPerGraph; ++op) enqueue(static_cast<int>(i));
    CHECK(cudaStreamEndCapture(ranks[i].stream, &graph));
    CHECK(cudaGraphInstantiate(&graphs[i], graph, 0));
    CHECK(cudaGraphDestroy(graph));
  }
  std::vector<double> times;
  for (int repeat = 0; repeat < 8; ++repeat) {
    float slowest = 0;
    for (size_t i = 0; i < n; ++i) {
      CHECK(cudaSetDevice(ranks[i].device));
      CHECK(cudaEventRecord(begin[i], ranks[i].stream));
      CHECK(cudaGraphLaunch(graphs[i], ranks[i].stream));
      CHECK(cudaEventRecord(end[i], ranks[i].stream));
    }
    synchronize(ranks);
    for (size_t i = 0; i < n; ++i) {
      float ms = 0;
      CHECK(cudaEventElapsedTime(&ms, begin[i], end[i]));
      slowest = std::max(slowest, ms);
    }
    if (repeat > 1) times.push_back(slowest * 1e3 / kOpsPerGraph);
  }
  for (size_t i = 0; i < n; ++i) {
    CHECK(cudaGraphExecDestroy(graphs[i]));
    CHECK(cudaEventDestroy(begin[i]));
    CHECK(cudaEventDestroy(end[i]));
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}
