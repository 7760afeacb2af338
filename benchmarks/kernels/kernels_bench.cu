// The kernels without JAX: every GPU of this machine is a rank, or several, each op is timed inside a CUDA graph, for
// several launch configurations. Prints microseconds per op and checks that combine(dispatch(x)) is x times its
// weights. With more ranks than GPUs, only configurations that leave room for all of a GPU's ranks are timed.
//
//   cmake -S tests -B build && cmake --build build --target kernels_bench
//   build/kernels_bench [ranks [eager | few]]: how many tokens are eager, or few tokens alone
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "graph_times.h"
#include "runtime/gpu/kernel_launch.h"
#include "runtime/group.h"

using namespace jax_ep;

namespace {

int gpu_count() {
  int count = 0;
  CHECK(cudaGetDeviceCount(&count));
  return count;
}

int gpu_of(size_t rank) { return static_cast<int>(rank) % gpu_count(); }

struct Shape {
  int tokens, hidden, top_k, experts;
};

template <class T>
T* upload(const std::vector<T>& host) {
  T* memory = device_array<T>(host.size());
  CHECK(cudaMemcpy(memory, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
  return memory;
}

// One rank: its inputs on the host, its buffers on the device, and its calls.
struct Rank {
  std::vector<__nv_bfloat16> tokens;
  std::vector<int32_t> ids;
  std::vector<float> weights;
  DispatchArgs dispatch{}, dispatch_float8{}, float8_rows{};  // the last leaves rows in float8
  ScatterArgs scatter{};
  CombineArgs combine{};
  int device{};
  cudaStream_t stream{};
};

Rank make_rank(const Shape& s, int rank, int ranks) {
  Rank r;
  r.device = gpu_of(rank);
  CHECK(cudaSetDevice(r.device));
  std::mt19937 random(rank + 1);
  r.tokens.resize(size_t{1} * s.tokens * s.hidden);
  for (auto& x : r.tokens) x = __float2bfloat16(static_cast<int>(random() % 2001) / 1000.0f - 1);
  for (int t = 0; t < s.tokens; ++t) {
    std::set<int> chosen;
    while (static_cast<int>(chosen.size()) < s.top_k) chosen.insert(random() % s.experts);
    r.ids.insert(r.ids.end(), chosen.begin(), chosen.end());
  }
  for (int i = 0; i < s.tokens * s.top_k; ++i) r.weights.push_back(static_cast<int>(random() % 1000) / 1000.0f);
  const int local = s.experts / ranks, capacity = s.tokens * s.top_k * 5 / 4;
  const size_t table = size_t{1} * ranks * s.tokens * s.top_k, row = size_t{2} * s.hidden;

  DispatchArgs& d = r.dispatch;
  d.dtype = DType::bfloat16;
  d.num_tokens = s.tokens, d.top_k = s.top_k, d.hidden = s.hidden, d.num_experts = s.experts;
  d.capacity = capacity, d.alignment = 1;
  d.tokens = reinterpret_cast<char*>(upload(r.tokens));
  d.expert_ids = upload(r.ids), d.token_weights = upload(r.weights);
  d.rows = device_array<char>(capacity * row), d.group_sizes = device_array<int32_t>(local);
  d.targets = device_array<int32_t>(r.ids.size()), d.row_of = device_array<int32_t>(table);
  d.weights = device_array<float>(table), d.counts = device_array<int32_t>(ranks * local);
  d.dropped = device_array<int32_t>(1), d.invalid = device_array<int32_t>(1);
  d.scratch = device_array<int32_t>(route_scratch_ints(s.experts, kMaxRanks, /*drop=*/false));
  d.landing = device_array<char>(ranks * s.tokens * row);
  d.few = are_few(s.tokens, s.top_k), d.eager = eager_tokens(s.tokens, s.top_k, Wire::plain);
  r.dispatch_float8 = d;
  r.dispatch_float8.wire = Wire::float8, r.dispatch_float8.eager = s.tokens;
  r.float8_rows = d;
  r.float8_rows.wire = Wire::float8_rows;
  r.float8_rows.scales = device_array<float>(size_t{1} * capacity * (s.hidden / 128));

  ScatterArgs& a = r.scatter;
  a.dtype = DType::bfloat16;
  a.num_tokens = s.tokens, a.top_k = s.top_k, a.hidden = s.hidden, a.local_experts = local, a.capacity = capacity;
  a.alignment = 1, a.tokens = d.tokens, a.targets = d.targets, a.row_of = d.row_of, a.counts = d.counts;
  a.rows = d.rows;

  CombineArgs& c = r.combine;
  c.dtype = DType::bfloat16;
  c.num_tokens = s.tokens, c.top_k = s.top_k, c.hidden = s.hidden, c.capacity = capacity;
  c.outputs = d.rows, c.weights = d.weights, c.targets = d.targets, c.row_of = d.row_of;
  c.combined = device_array<char>(s.tokens * row);
  c.landing = device_array<char>(ranks * s.tokens * row);
  CHECK(cudaStreamCreateWithFlags(&r.stream, cudaStreamNonBlocking));
  return r;
}

void release(Rank& r) {
  const DispatchArgs& d = r.dispatch;
  const void* all[] = {d.tokens,      d.expert_ids,       d.token_weights,   d.rows,
                       d.group_sizes, d.targets,          d.row_of,          d.weights,
                       d.counts,      d.dropped,          d.invalid,         d.scratch,
                       d.landing,     r.combine.combined, r.combine.landing, r.float8_rows.scales};
  for (const void* each : all) CHECK(cudaFree(const_cast<void*>(each)));
  CHECK(cudaStreamDestroy(r.stream));
}

// Microseconds per op. After a failure of the group they mean nothing.
template <class ArgsOf>
double time_op(const Group& group, const std::vector<Rank>& ranks, const LaunchConfig& config, ArgsOf args_of) {
  return time_graphs(ranks, [&](int rank) {
    CHECK(start_kernel(config, ranks[rank].stream, group.comm({0, rank}), args_of(ranks[rank])));
  });
}

double round_trip_error(const std::vector<Rank>& ranks, const Shape& s) {
  double worst = 0;
  for (size_t i = 0; i < ranks.size(); ++i) {
    CHECK(cudaSetDevice(ranks[i].device));
    std::vector<__nv_bfloat16> out(size_t{1} * s.tokens * s.hidden);
    CHECK(cudaMemcpy(out.data(), ranks[i].combine.combined, out.size() * 2, cudaMemcpyDeviceToHost));
    for (int t = 0; t < s.tokens; t += 7) {
      const float weight = std::accumulate(&ranks[i].weights[t * s.top_k], &ranks[i].weights[(t + 1) * s.top_k], 0.0f);
      for (int h = 0; h < s.hidden; h += 3) {
        const size_t at = size_t{1} * t * s.hidden + h;
        const double want = weight * __bfloat162float(ranks[i].tokens[at]);
        const double error = std::abs(__bfloat162float(out[at]) - want) / s.top_k;
        worst = std::isnan(error) ? INFINITY : std::max(worst, error);
      }
    }
  }
  return worst;
}

// `eager`: the tokens that set off before their rows are known, if not as many as the library chooses.
void run(int n, const Shape& s, const std::vector<LaunchConfig>& dispatches, const std::vector<LaunchConfig>& combines,
         int eager = -1) {
  std::vector<int> devices;
  for (int i = 0; i < n; ++i) devices.push_back(gpu_of(i));
  Group group({devices}, 2.0, false);
  std::vector<Rank> ranks;
  for (int i = 0; i < n; ++i) {
    ranks.push_back(make_rank(s, i, n));
    if (eager >= 0) ranks.back().dispatch.eager = ranks.back().float8_rows.eager = eager;
    CHECK(load_kernels(227 * 1024));
  }
  const int ranks_per_gpu = (n + gpu_count() - 1) / gpu_count();
  const auto fits = [&](const LaunchConfig& c) { return c.blocks * ranks_per_gpu <= 132; };
  std::printf("T=%d H=%d top-%d of %d, bf16, %d ranks on %d GPUs, %d eager\n", s.tokens, s.hidden, s.top_k, s.experts,
              n, gpu_count(), ranks[0].dispatch.eager);
  const auto print = [&](const char* op, const LaunchConfig& c, double us) {
    std::printf("%-14s blocks %3d threads %3d senders %2d stage %5d: %8.1f us\n", op, c.blocks, c.threads,
                c.senders_per_cta, c.warp_bytes, us);
    std::fflush(stdout);
    if (const auto error = group.take_error()) {
      std::printf("FAILED %s: %s\n", name_of(error->kind), error->message.c_str());
      std::exit(1);
    }
  };
  for (const LaunchConfig& c : dispatches)
    if (fits(c) && s.hidden % 128 == 0)
      print("dispatch fp8", c, time_op(group, ranks, c, [](const Rank& r) { return r.dispatch_float8; }));
  for (const LaunchConfig& c : dispatches)
    if (fits(c) && s.hidden % 128 == 0)
      print("fp8 rows", c, time_op(group, ranks, c, [](const Rank& r) { return r.float8_rows; }));
  for (const LaunchConfig& c : dispatches)
    if (fits(c)) print("dispatch", c, time_op(group, ranks, c, [](const Rank& r) { return r.dispatch; }));
  for (const LaunchConfig& c : dispatches)
    if (fits(c)) print("scatter", c, time_op(group, ranks, c, [](const Rank& r) { return r.scatter; }));
  for (const LaunchConfig& c : combines)
    if (fits(c)) print("combine", c, time_op(group, ranks, c, [](const Rank& r) { return r.combine; }));
  if (!combines.empty()) std::printf("round trip error %.4f\n", round_trip_error(ranks, s));
  for (Rank& r : ranks) release(r);
}

}  // namespace

int main(int argc, char** argv) {
  const int n = argc > 1 ? std::atoi(argv[1]) : gpu_count();
  constexpr int kMove = 128 + 3 * 7168, kStream = 128 + 7 * 4096;
  if (argc > 2 && !std::strcmp(argv[2], "eager")) {
    for (const int eager : {0, 64, 128, 256, 512, 1024, 2048})
      run(n, {4096, 7168, 8, 256},
          {{24, 256, 3, kStream}, {24, 256, 5, kStream}, {96, 256, 2, kStream}, {96, 256, 3, kStream}}, {}, eager);
    return 0;
  }
  const bool few = argc > 2 && !std::strcmp(argv[2], "few");
  if (!few) run(n, {14744, 7168, 1, 256}, {{24, 256, 4, kMove}, {64, 256, 4, kMove}}, {});  // a pure push
  if (!few) run(n, {700, 8, 8, 64}, {{24, 256, 6, kMove}}, {{24, 256, 6, kStream}});
  run(n, {3, 2880, 4, 128}, {{24, 256, 6, kMove}}, {{24, 256, 6, kStream}});
  std::vector<LaunchConfig> dispatches, combines;
  for (const int blocks : {24, 64, 96, 128}) {
    dispatches.push_back({blocks, 256, 6, kMove});
    for (const int senders : {2, 3, 4, 6}) dispatches.push_back({blocks, 256, senders, kStream});
  }
  for (const int blocks : {24, 64, 96, 128})
    for (const int senders : {4, 6, 8}) combines.push_back({blocks, 256, senders, kStream});
  if (!few) run(n, {4096, 7168, 8, 256}, dispatches, combines);
  dispatches.clear(), combines.clear();
  for (const int blocks : {64, 96, 128}) {
    for (const int senders : {1, 2, 4}) dispatches.push_back({blocks, 256, senders, kStream});
    for (const int senders : {4, 6, 8}) combines.push_back({blocks, 256, senders, kStream});
  }
  run(n, {128, 7168, 8, 256}, dispatches, combines);
  return 0;
}
