// The kernels without JAX. Every GPU of this machine is a rank, or several. Each op is timed inside a CUDA graph, for
// several launch configurations. Prints microseconds per op, and the largest difference of combine(dispatch(x)) from x
// times its weights. With more ranks than GPUs, only configurations that leave room for all of a GPU's ranks are timed.
//
//   cmake -S tests -B build && cmake --build build --target kernels_bench
//   build/kernels_bench [ranks [few | planned | T H K E]]
//
// few: few tokens alone. planned: the launches that users get. T H K E: one shape.
#include <cmath>
#include <cstdio>
#include <string>

#include "graph_times.h"
#include "kernels/plan.h"
#include "moe_rank.h"
#include "runtime/group.h"

namespace {

constexpr int kSms = 132, kSharedBytes = 227 * 1024;

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
      float weight = 0;
      for (int k = t * s.top_k; k < (t + 1) * s.top_k; ++k) weight += ranks[i].ids[k] < 0 ? 0 : ranks[i].weights[k];
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

std::vector<int> devices_of(int n) {
  std::vector<int> devices;
  for (int i = 0; i < n; ++i) devices.push_back(gpu_of(i));
  return devices;
}

std::vector<Rank> make_ranks(int n, const Shape& s) {
  std::vector<Rank> ranks;
  for (int i = 0; i < n; ++i) {
    ranks.push_back(make_rank(s, i, n));
    CHECK(load_kernels(kSharedBytes));
  }
  return ranks;
}

void exit_on_failure(Group& group, const char* op) {
  const auto error = group.take_error();
  if (!error) return;
  std::printf("FAILED %s: %s\n", name_of(error->kind), error->message.c_str());
  std::exit(1);
}

using Launches = std::vector<LaunchConfig>;

// Those that users get on so many SMs.
template <class Args>
Launches planned_launches(int ranks, const Args& args) {
  using Spec = OpSpec<Args>;
  const HardwareModel whole = hardware_model(kSms, kSharedBytes, 32);
  Launches launches;
  for (const int sms : {96, 60, 32, 24, 16})
    launches.push_back(plan_rows(RowShape{Spec::kLaunch, ranks, Spec::work_size(args)}, limit_sms(whole, sms)));
  return launches;
}

constexpr double kWire = 369;  // GB/s that the SMs of an H200 store to peers, one way

// Rows that rank 0 sends to peers: one for each of its tokens and each peer that owns one of the token's experts.
int rows_sent(const Rank& rank, const Shape& s, int n) {
  int rows = 0;
  for (int t = 0; t < s.tokens; ++t) {
    std::set<int> owners;
    for (int k = 0; k < s.top_k; ++k)
      if (const int id = rank.ids[t * s.top_k + k]; id >= s.experts / n) owners.insert(id / (s.experts / n));
    rows += owners.size();
  }
  return rows;
}

// Times every op of a shape, by the launches given. Without any: by those that users get, by the number of SMs, as
// `Group(max_sms=)` sets it.
void run(int n, const Shape& s, const Launches& dispatches = {}, const Launches& combines = {}) {
  const bool planned = dispatches.empty();
  Group group({devices_of(n)}, 2.0, false);
  std::vector<Rank> ranks = make_ranks(n, s);
  const int ranks_per_gpu = (n + gpu_count() - 1) / gpu_count(), rows = rows_sent(ranks[0], s, n);
  static constexpr const char* kChosen[] = {"all experts", "half of the tokens", "half of the experts"};
  std::printf("T=%d H=%d top-%d of %d, %s, %d ranks on %d GPUs, %d eager: %d rows sent, %.0f us at %.0f GB/s\n",
              s.tokens, s.hidden, s.top_k, s.experts, kChosen[static_cast<int>(s.chosen)], n, gpu_count(),
              ranks[0].dispatch.eager, rows, rows * 2e-3 * s.hidden / kWire, kWire);
  const auto time = [&](const char* op, Launches launches, auto args_of) {
    if (planned) launches = planned_launches(n, args_of(ranks[0]));
    for (const LaunchConfig& c : launches) {
      if (c.ctas * ranks_per_gpu > kSms) continue;
      const double us = time_op(group, ranks, c, args_of);
      std::printf("%-20s CTAs %3d threads %3d senders %2d stage %5d: %8.1f us\n", op, c.ctas, c.threads,
                  c.senders_per_cta, c.warp_bytes, us);
      std::fflush(stdout);
      exit_on_failure(group, op);
    }
  };
  if (s.hidden % 128 == 0) {
    time("dispatch float8", dispatches, [](const Rank& r) { return r.dispatch_float8; });
    time("float8 rows", dispatches, [](const Rank& r) { return r.float8_rows; });
  }
  time("not expanded", dispatches, [](const Rank& r) { return r.not_expanded; });
  time("dispatch", dispatches, [](const Rank& r) { return r.dispatch; });  // whose rows the others read
  time("scatter", dispatches, [](const Rank& r) { return r.scatter; });
  time("combine with scalars", combines, [](const Rank& r) { return r.with_scalars; });
  time("combine", combines, [](const Rank& r) { return r.combine; });
  if (planned || !combines.empty()) std::printf("round trip error %.4f\n", round_trip_error(ranks, s));
  for (Rank& r : ranks) release(r);
}

}  // namespace

int main(int argc, char** argv) {
  const int n = argc > 1 ? std::atoi(argv[1]) : gpu_count();
  const std::string what = argc == 3 ? argv[2] : "";
  if (n < 1 || (argc > 3 && argc != 6) || !(what.empty() || what == "few" || what == "planned")) {
    std::fprintf(stderr, "usage: kernels_bench [ranks [few | planned | T H K E]]\n");
    return 1;
  }
  const Shape v3{4096, 7168, 8, 256}, few{128, 7168, 8, 256};
  // An expert has as many rows as on eight ranks of Qwen3-30B, Qwen3-Next and V3.
  std::vector<Shape> shapes{{32768, 2048, 2, 32}, {40960, 2048, 2, 128}, {16384, 7168, 2, 64}};
  if (n != 2) shapes = {{32768, 2048, 8, 128}};
  shapes.push_back({8192, 2048, 8, 128});
  shapes.push_back(v3);
  if (what == "planned") {
    shapes.push_back(few);
    for (const Chosen half : {Chosen::half_the_tokens, Chosen::half_the_experts}) {
      if (n == 2) shapes.push_back({32768, 2048, 2, 32, half});
      shapes.push_back({8192, 2048, 8, 128, half});
    }
    for (const Shape& shape : shapes) run(n, shape);
    return 0;
  }
  constexpr int kMove = 128 + 3 * 7168, kStream = kWarpBytes;
  Launches dispatches, combines;
  for (const int ctas : {16, 24, 32, 64, 96}) {
    dispatches.push_back({ctas, 256, 6, kMove});
    for (int senders = 2; senders <= 7; ++senders) dispatches.push_back({ctas, 256, senders, kStream});
    for (int senders = 2; senders <= 8; ++senders) combines.push_back({ctas, 256, senders, kStream});
  }
  if (argc == 6) shapes = {{std::atoi(argv[2]), std::atoi(argv[3]), std::atoi(argv[4]), std::atoi(argv[5])}};
  if (what.empty())
    for (const Shape& shape : shapes) run(n, shape, dispatches, combines);
  if (argc == 6) return 0;
  run(n, {3, 2880, 4, 128}, {{24, 256, 6, kMove}}, {{24, 256, 6, kStream}});
  if (what.empty()) {
    run(n, {700, 8, 8, 64}, {{24, 256, 6, kMove}}, {{24, 256, 6, kStream}});
    run(n, {14744, 7168, 1, 256}, {{24, 256, 4, kMove}, {64, 256, 4, kMove}});  // a pure push
  }
  dispatches.clear(), combines.clear();
  for (const int ctas : {64, 96, 128}) {
    for (const int senders : {1, 2, 4}) dispatches.push_back({ctas, 256, senders, kStream});
    for (const int senders : {4, 6, 8}) combines.push_back({ctas, 256, senders, kStream});
  }
  run(n, few, dispatches, combines);
  return 0;
}
