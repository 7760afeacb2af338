// The forward pass of a mixture layer in order, and in two waves of experts, without JAX: every GPU of this machine is
// a rank. A wave is half of each rank's experts. The exchange of one wave runs beside the products of the other, each
// on SMs of its own. The variants take turns on hot GPUs. Prints microseconds of each, and how much the results of the
// waves differ from those in order. A layer would also add the results of its waves, which is not timed.
//
//   cmake -S tests -B build && cmake --build build --target waves_bench
//   build/waves_bench T H F E K [rounds]: tokens of a rank, hidden, inner, experts, top-K
#include <functional>
#include <numeric>
#include <string>
#include <utility>

#include "graph_times.h"
#include "kernels/plan.h"
#include "moe_rank.h"
#include "runtime/cuda/grouped_matmul_launch.h"
#include "runtime/group.h"

namespace {

constexpr int kPassesPerGraph = 4, kGraphs = 3, kSharedBytes = 227 * 1024;
const HardwareModel kWhole = hardware_model(132, kSharedBytes, 32);  // ops on rows take 96 SMs of it

[[noreturn]] void fail(const std::string& what, const std::string& message) {
  std::printf("FAILED %s: %s\n", what.c_str(), message.c_str());
  std::exit(1);
}

struct Layer {
  int tokens, hidden, inner, experts, top_k;
};

// Bytes of one of the three arrays of matrices: gate, up, down.
size_t weight_bytes(const Layer& x, int experts) { return size_t{2} * experts * x.hidden * x.inner; }

// Experts whose rows travel together: a part of the experts of each rank. Each wave has buffers of its own.
struct Wave {
  Rank rank;
  gemm::GroupedMatmul gated{}, down{};

  Wave(const Layer& x, const char* weights, int index, int ranks, Part part)
      : rank(make_rank({x.tokens, x.hidden, x.top_k, x.experts}, index, ranks)) {
    const int local = x.experts / ranks, groups = local / part.count, first = part.index * groups;
    for (int32_t& id : rank.ids)
      if (id % local / groups != part.index) id = -1;
    rank.dispatch.expert_ids = upload(rank.ids);
    const int capacity = rank.dispatch.capacity / part.count;
    const size_t all_bytes = weight_bytes(x, local), inner_bytes = size_t{2} * capacity * x.inner;
    const char* const gate = weights + weight_bytes(x, first);
    char* const inner = device_array<char>(3 * inner_bytes);

    gated.grouping = gemm::Grouping::m_grouped, gated.rhs_is_k_by_n = true;
    gated.operand_dtype = gated.dtype = gemm::Element::bfloat16;
    gated.m = capacity, gated.groups = groups, gated.group_sizes = rank.dispatch.group_sizes + first;
    gated.counter = device_array<uint32_t>(1);
    down = gated;
    gated.formula = gemm::Formula::gated, gated.activation = gemm::Activation::silu;
    gated.n = gated.columns = x.inner, gated.k = x.hidden, gated.lhs = rank.dispatch.rows;
    gated.rhs = gate, gated.second_rhs = gate + all_bytes, gated.result = inner;
    gated.keeps_products = true;  // as in training
    gated.first_product = inner + inner_bytes, gated.second_product = inner + 2 * inner_bytes;
    down.n = down.columns = x.hidden, down.k = x.inner;
    down.lhs = inner, down.rhs = gate + 2 * all_bytes;
    down.result = device_array<char>(size_t{2} * capacity * x.hidden);
    rank.dispatch.capacity = rank.combine.capacity = capacity;
    rank.combine.rows = static_cast<const char*>(down.result);
  }

  // Fills all that passes from kernel to kernel, and the result, with NaN.
  void spoil() const {
    CHECK(cudaMemset(rank.combine.combined, 0xff, size_t{2} * rank.combine.num_tokens * rank.combine.hidden));
    for (const auto& [data, columns] : {std::pair(gated.lhs, gated.k), {down.lhs, down.k}, {down.result, down.n}})
      CHECK(cudaMemset(const_cast<void*>(data), 0xff, size_t{2} * gated.m * columns));
  }
};

// One rank. follow() puts all ops of the group in one order, and only products run beside them. So one group is enough,
// although its ops share a signal pad.
struct Gpu {
  int device;
  const Comm& comm;
  Wave all, first, second;
  cudaStream_t stream = all.rank.stream, side = second.rank.stream;
  cudaEvent_t event{}, begin{}, end{};

  // dispatch or combine, as users get it with so many SMs.
  template <class Args>
  void exchange(const Args& args, const HardwareModel& on, cudaStream_t s) const {
    using Spec = OpSpec<Args>;
    CHECK(start_kernel(plan_rows(RowShape{Spec::kLaunch, comm.size, Spec::work_size(args)}, on), s, comm, args));
  }
  void dispatch(const Wave& wave) const { exchange(wave.rank.dispatch, kWhole, stream); }
  void combine(const Wave& wave) const { exchange(wave.rank.combine, kWhole, stream); }
  void multiply(const gemm::GroupedMatmul& x, int sms) const {
    if (const auto error = gemm::launch(x, gemm::plan_tiles(x, sms), stream)) fail("product", *error);
  }
  void multiply(const Wave& wave) const { multiply(wave.gated, kWhole.sms), multiply(wave.down, kWhole.sms); }

  // The first dispatch and the last combine run alone, on as many SMs as in order. With `last_on_all` the last product
  // gets all SMs, because the first combine has often ended by then.
  void in_waves(int exchange_sms, bool last_on_all) const {
    const HardwareModel few = limit_sms(kWhole, exchange_sms);
    const int rest = kWhole.sms - exchange_sms;
    dispatch(first);
    follow(stream, side);
    exchange(second.rank.dispatch, few, side);
    multiply(first.gated, rest), multiply(first.down, rest);
    follow(side, stream);
    follow(stream, side);
    exchange(first.rank.combine, few, side);
    multiply(second.gated, rest), multiply(second.down, last_on_all ? kWhole.sms : rest);
    follow(side, stream);
    combine(second);
  }
  void follow(cudaStream_t earlier, cudaStream_t later) const {
    CHECK(cudaEventRecord(event, earlier));
    CHECK(cudaStreamWaitEvent(later, event));
  }
};

struct Variant {
  std::string name;
  std::function<void(const Gpu&)> enqueue;
  std::vector<cudaGraphExec_t> graphs{};
  std::vector<double> times{};
};

constexpr int kWaves = 5;  // the first variant in waves
std::vector<Variant> all_variants() {
  std::vector<Variant> variants{
      {"in order", [](const Gpu& x) { x.dispatch(x.all), x.multiply(x.all), x.combine(x.all); }},
      {"exchange", [](const Gpu& x) { x.dispatch(x.all), x.combine(x.all); }},
      {"products", [](const Gpu& x) { x.multiply(x.all); }},
      {"exchanges of both waves",
       [](const Gpu& x) { x.dispatch(x.first), x.combine(x.first), x.dispatch(x.second), x.combine(x.second); }},
      {"products of both waves", [](const Gpu& x) { x.multiply(x.first), x.multiply(x.second); }}};
  for (const bool last_on_all : {false, true})
    for (const int sms : {16, 24, 32})
      variants.push_back({"waves, exchange on " + std::to_string(sms) + (last_on_all ? ", last product on all" : ""),
                          [=](const Gpu& x) { x.in_waves(sms, last_on_all); }});
  return variants;
}

void capture(Variant& variant, const std::vector<Gpu>& gpus) {
  on_each(gpus.size(), [&](int i) {
    cudaGraph_t graph;
    CHECK(cudaStreamBeginCapture(gpus[i].stream, cudaStreamCaptureModeThreadLocal));
    for (int pass = 0; pass < kPassesPerGraph; ++pass) variant.enqueue(gpus[i]);
    CHECK(cudaStreamEndCapture(gpus[i].stream, &graph));
    CHECK(cudaGraphInstantiate(&variant.graphs.emplace_back(), graph, 0));
    CHECK(cudaGraphDestroy(graph));
  });
}

void wait_for(const std::vector<Gpu>& gpus, Group& group, const Variant& variant) {
  synchronize(gpus);
  if (const auto error = group.take_error()) fail(variant.name, name_of(error->kind) + (": " + error->message));
}

// Microseconds of a pass of the slowest rank. One graph goes ahead, so that the GPU is hot.
double time_once(const Variant& variant, const std::vector<Gpu>& gpus, Group& group) {
  on_each(gpus.size(), [&](int i) {
    CHECK(cudaGraphLaunch(variant.graphs[i], gpus[i].stream));
    CHECK(cudaEventRecord(gpus[i].begin, gpus[i].stream));
    for (int k = 0; k < kGraphs; ++k) CHECK(cudaGraphLaunch(variant.graphs[i], gpus[i].stream));
    CHECK(cudaEventRecord(gpus[i].end, gpus[i].stream));
  });
  wait_for(gpus, group, variant);
  std::vector<float> ms(gpus.size());
  for (size_t i = 0; i < gpus.size(); ++i) CHECK(cudaEventElapsedTime(&ms[i], gpus[i].begin, gpus[i].end));
  return *std::max_element(ms.begin(), ms.end()) * 1e3 / (kGraphs * kPassesPerGraph);
}

// Runs one pass in waves on buffers of NaN. The largest difference from the result in order, by the largest value.
double difference(const Variant& variant, const std::vector<Gpu>& gpus, Group& group) {
  on_each(gpus.size(), [&](int i) {
    gpus[i].first.spoil(), gpus[i].second.spoil();
    CHECK(cudaDeviceSynchronize());
    variant.enqueue(gpus[i]);
  });
  wait_for(gpus, group, variant);
  double worst = 0, largest = 0;
  for (const Gpu& gpu : gpus) {
    const auto values = [](const Wave& wave) {  // of the first tokens
      const CombineArgs& x = wave.rank.combine;
      return download<__nv_bfloat16>(x.combined, size_t{1} * std::min(x.num_tokens, 1024) * x.hidden);
    };
    const auto all = values(gpu.all), first = values(gpu.first), second = values(gpu.second);
    for (size_t j = 0; j < all.size(); ++j) {
      const double error = std::fabs(all[j] - first[j] - second[j]);
      worst = std::isnan(error) ? INFINITY : std::max(worst, error);
      largest = std::max<double>(largest, std::fabs(all[j]));
    }
  }
  return worst / largest;
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<int> x;
  for (int i = 1; i < argc; ++i) x.push_back(std::atoi(argv[i]));
  const int ranks = gpu_count(), rounds = x.size() > 5 ? x[5] : 7;
  if (x.size() < 5 || *std::min_element(x.begin(), x.end()) < 1 || x[1] % 8 || x[2] % 8 || x[3] % (2 * ranks) ||
      x[4] > x[3]) {
    std::puts("waves_bench T H F E K [rounds]: H and F are multiples of 8, E is one of 2 x GPUs, K is at most E");
    return 2;
  }
  const Layer layer{x[0], x[1], x[2], x[3], x[4]};
  std::vector<int> devices(ranks);
  std::iota(devices.begin(), devices.end(), 0);
  Group group({devices}, 5.0, /*poison=*/false);
  std::vector<Gpu> gpus;
  on_each(ranks, [&](int i) {
    CHECK(load_kernels(kSharedBytes));
    CHECK(gemm::load());
    const size_t bytes = 3 * weight_bytes(layer, layer.experts / ranks);
    char* const weights = device_array<char>(bytes);
    fill<<<1024, 256>>>(reinterpret_cast<__nv_bfloat16*>(weights), bytes / 2, 11);
    const auto wave = [&](int index, int count) { return Wave(layer, weights, i, ranks, {index, count}); };
    gpus.push_back({i, group.comm({0, i}), wave(0, 1), wave(0, 2), wave(1, 2)});
    for (cudaEvent_t* event : {&gpus[i].event, &gpus[i].begin, &gpus[i].end}) CHECK(cudaEventCreate(event));
    CHECK(cudaDeviceSynchronize());
  });
  std::vector<Variant> variants = all_variants();
  for (Variant& variant : variants) capture(variant, gpus);
  for (int round = 0; round <= rounds; ++round)
    for (Variant& variant : variants)
      if (const double us = time_once(variant, gpus, group); round > 0) variant.times.push_back(us);
  std::printf("T=%d H=%d F=%d top-%d of %d, bf16, %d ranks, medians of %d rounds\n", layer.tokens, layer.hidden,
              layer.inner, layer.top_k, layer.experts, ranks, rounds);
  for (Variant& variant : variants) std::sort(variant.times.begin(), variant.times.end());
  for (const Variant& variant : variants) {
    const double us = variant.times[rounds / 2], in_order = variants[0].times[rounds / 2];
    std::printf("%-42s %9.1f us  %.3f x in order\n", variant.name.c_str(), us, us / in_order);
  }
  double worst = 0;
  for (size_t i = kWaves; i < variants.size(); ++i) worst = std::max(worst, difference(variants[i], gpus, group));
  std::printf("difference of the waves' results %.4f\n", worst);
  return !(worst <= 1.0 / 64);  // NaN too
}
