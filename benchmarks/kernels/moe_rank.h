// dispatch, combine and scatter of one routing without JAX: a rank's operands and results, for kernels_bench and
// residency.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdlib>
#include <random>
#include <set>
#include <vector>

#include "check.h"
#include "kernels/kernels.h"
#include "runtime/gpu/kernel_launch.h"

using namespace jax_ep;

inline int gpu_count() {
  int count = 0;
  CHECK(cudaGetDeviceCount(&count));
  return count;
}

inline int gpu_of(size_t rank) { return static_cast<int>(rank) % gpu_count(); }

// Which ids are not -1: all; all of every other token; those of half of each rank's experts.
enum class Chosen { all, half_the_tokens, half_the_experts };

struct Shape {
  int tokens, hidden, top_k, experts;
  Chosen chosen = Chosen::all;

  bool has(int token, int expert, int ranks) const {
    const int local = experts / ranks;
    return chosen == Chosen::all || (chosen == Chosen::half_the_tokens ? token % 2 == 0 : expert % local < local / 2);
  }
};

// One rank in bfloat16: its inputs on the host, its buffers on the device, and its calls. scatter and dispatch have the
// same result.
struct Rank {
  std::vector<__nv_bfloat16> tokens;
  std::vector<int32_t> ids;
  std::vector<float> weights;
  DispatchArgs dispatch{}, not_expanded{}, dispatch_float8{}, float8_rows{};  // the last leaves rows in float8
  ScatterArgs scatter{};
  CombineArgs combine{}, with_scalars{};
  int device{};
  cudaStream_t stream{};
  std::vector<void*> owned;

  template <class T>
  T* own(T* memory) {
    owned.push_back(memory);
    return memory;
  }
  template <class T>
  T* array(size_t count) {
    return own(device_array<T>(count));
  }
};

inline Rank make_rank(const Shape& s, int rank, int ranks) {
  Rank r;
  r.device = gpu_of(rank);
  CHECK(cudaSetDevice(r.device));
  std::mt19937 random(rank + 1);
  r.tokens.resize(size_t{1} * s.tokens * s.hidden);
  for (auto& x : r.tokens) x = __float2bfloat16(static_cast<int>(random() % 2001) / 1000.0f - 1);
  for (int t = 0; t < s.tokens; ++t) {
    std::set<int> chosen;
    while (static_cast<int>(chosen.size()) < s.top_k) chosen.insert(random() % s.experts);
    for (const int id : chosen) r.ids.push_back(s.has(t, id, ranks) ? id : -1);
  }
  for (int i = 0; i < s.tokens * s.top_k; ++i) r.weights.push_back(static_cast<int>(random() % 1000) / 1000.0f);
  const int local = s.experts / ranks, capacity = s.tokens * s.top_k * 5 / 4;
  const size_t table = size_t{1} * ranks * s.tokens * s.top_k, row = size_t{2} * s.hidden;

  DispatchArgs& d = r.dispatch;
  d.dtype = DType::bfloat16;
  d.num_tokens = s.tokens, d.top_k = s.top_k, d.hidden = s.hidden, d.num_experts = s.experts;
  d.capacity = capacity, d.alignment = 1, d.zero_unused = false;  // as in a layer
  d.tokens = reinterpret_cast<char*>(r.own(upload(r.tokens)));
  d.expert_ids = r.own(upload(r.ids)), d.token_weights = r.own(upload(r.weights));
  d.rows = r.array<char>(capacity * row), d.group_sizes = r.array<int32_t>(local);
  d.targets = r.array<int32_t>(r.ids.size()), d.row_of = r.array<int32_t>(table);
  d.weights = r.array<float>(table), d.counts = r.array<int32_t>(ranks * local);
  d.dropped = r.array<int32_t>(1), d.invalid = r.array<int32_t>(1);
  d.route_scratch = r.array<int32_t>(route_scratch_ints(s.experts, kMaxRanks, /*drop=*/false));
  d.landing = r.array<char>(ranks * s.tokens * row);
  d.by_assignments = routes_by_assignments(s.tokens, s.top_k);
  d.eager = eager_tokens(s.tokens, s.top_k, row_bytes(d), Wire::plain);
  r.dispatch_float8 = d;
  r.dispatch_float8.wire = Wire::float8, r.dispatch_float8.eager = s.tokens;
  r.float8_rows = d;
  r.float8_rows.wire = Wire::float8_rows;
  r.float8_rows.scales = r.array<float>(size_t{1} * capacity * (s.hidden / 128));

  r.not_expanded = d;
  r.not_expanded.expand = false, r.not_expanded.eager = s.tokens;
  r.not_expanded.rows = r.array<char>(ranks * s.tokens * row);
  r.not_expanded.indices = r.array<int32_t>(capacity);

  ScatterArgs& a = r.scatter;
  a.dtype = DType::bfloat16;
  a.num_tokens = s.tokens, a.top_k = s.top_k, a.hidden = s.hidden, a.local_experts = local, a.capacity = capacity;
  a.alignment = 1, a.zero_unused = false, a.tokens = d.tokens, a.targets = d.targets, a.row_of = d.row_of,
  a.counts = d.counts;
  a.rows = d.rows;

  CombineArgs& c = r.combine;
  c.dtype = DType::bfloat16;
  c.num_tokens = s.tokens, c.top_k = s.top_k, c.hidden = s.hidden, c.capacity = capacity;
  c.rows = d.rows, c.weights = d.weights, c.targets = d.targets, c.row_of = d.row_of;
  c.combined = r.array<char>(s.tokens * row);
  c.landing = r.array<char>(ranks * s.tokens * row);
  r.with_scalars = c;
  r.with_scalars.scalars = r.array<float>(table), r.with_scalars.returned = r.array<float>(r.ids.size());
  CHECK(cudaStreamCreateWithFlags(&r.stream, cudaStreamNonBlocking));
  return r;
}

inline void release(Rank& r) {
  for (void* each : r.owned) CHECK(cudaFree(each));
  CHECK(cudaStreamDestroy(r.stream));
}
