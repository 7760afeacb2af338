// Whether ops end while another kernel holds all SMs but one of every GPU, with the bits of an undisturbed run. On all
// GPUs, a rank each.
//
//   cmake -S tests -B build && cmake --build build --target residency
//   build/residency
#include <cuda_runtime.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "check.h"
#include "kernels/kernels.h"
#include "runtime/gpu/kernel_launch.h"
#include "runtime/group.h"

using namespace jax_ep;

namespace {

constexpr int kSharedBytes = 227 * 1024;
constexpr uint64_t kHeldNs = 2'000'000'000;
constexpr LaunchConfig kConfig{96, 256, 4, 128 + 7 * 4096};

// Memory of the current device that is read back after an op.
struct Array {
  void* data = nullptr;
  size_t bytes = 0;

  explicit Array(size_t size) : bytes(size) { data = device_array<char>(size); }
  template <class T>
  explicit Array(const std::vector<T>& host) : Array(host.size() * sizeof(T)) {
    CHECK(cudaMemcpy(data, host.data(), bytes, cudaMemcpyHostToDevice));
  }
  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
  std::vector<char> read() const {
    std::vector<char> host(bytes);
    CHECK(cudaMemcpy(host.data(), data, bytes, cudaMemcpyDeviceToHost));
    return host;
  }
};

using Launch = std::function<cudaError_t(cudaStream_t, const Comm&)>;

// An op: by rank, how it is launched and what it writes.
struct Case {
  const char* name;
  std::vector<Launch> launches;
  std::vector<std::vector<Array>> results;
};

// Calls run(rank) with the device of each rank as the current one.
template <class Run>
void on_each(int ranks, Run run) {
  for (int rank = 0; rank < ranks; ++rank) {
    CHECK(cudaSetDevice(rank));
    run(rank);
  }
}
void synchronize(int ranks) {
  on_each(ranks, [](int) { CHECK(cudaDeviceSynchronize()); });
}

std::mt19937& randoms() {
  static std::mt19937 random(20261122);
  return random;
}

std::vector<int32_t> integers(size_t count, int below) {
  std::vector<int32_t> found(count);
  for (int32_t& x : found) x = static_cast<int>(randoms()() % below);
  return found;
}
std::vector<float> floats(size_t count) {
  std::vector<float> found(count);
  for (float& x : found) x = static_cast<int>(randoms()() % 2001) / 1000.0f - 1;
  return found;
}

// dispatch, combine and combine's gradient of one routing.
void add_routed(std::vector<Case>& cases, int ranks, int tokens) {
  constexpr int kTopK = 8, kHidden = 1024, kExperts = 64;
  const int capacity = ranks * tokens * kTopK, local = kExperts / ranks;
  const size_t table = size_t{1} * tokens * kTopK, row = kHidden * sizeof(float);
  const bool few = tokens <= kFewTokens;
  Case dispatch{few ? "dispatch, few tokens" : "dispatch", {}, {}},
      combine{few ? "combine, few tokens" : "combine", {}, {}},
      scatter{few ? "its gradient, few tokens" : "its gradient", {}, {}};
  on_each(ranks, [&](int) {
    DispatchArgs d{};
    d.dtype = DType::float32;
    d.num_tokens = tokens, d.top_k = kTopK, d.hidden = kHidden, d.num_experts = kExperts, d.capacity = capacity;
    d.alignment = 1, d.few = are_few(tokens, kTopK), d.eager = eager_tokens(tokens, kTopK, Wire::plain);
    const Array rows(capacity * row), sizes(local * 4), targets(table * 4), row_of(ranks * table * 4),
        row_weights(ranks * table * 4), counts(kExperts * 4), combined(tokens * row), scattered(capacity * row);
    d.tokens = Array(floats(size_t{1} * tokens * kHidden)).as<char>();
    d.expert_ids = Array(integers(table, kExperts)).as<int32_t>(), d.token_weights = Array(floats(table)).as<float>();
    d.rows = rows.as<char>(), d.group_sizes = sizes.as<int32_t>(), d.targets = targets.as<int32_t>();
    d.row_of = row_of.as<int32_t>(), d.weights = row_weights.as<float>(), d.counts = counts.as<int32_t>();
    d.dropped = Array(4).as<int32_t>(), d.invalid = Array(4).as<int32_t>();
    d.scratch = Array(route_scratch_ints(kExperts, kMaxRanks, /*drop=*/false) * 4).as<int32_t>(),
    d.landing = Array(ranks * tokens * row).as<char>();
    CombineArgs c{};
    c.dtype = DType::float32;
    c.num_tokens = tokens, c.top_k = kTopK, c.hidden = kHidden, c.capacity = capacity;
    c.outputs = d.rows, c.weights = d.weights, c.targets = d.targets, c.row_of = d.row_of;
    c.combined = combined.as<char>(), c.landing = Array(ranks * tokens * row).as<char>();
    ScatterArgs s{};
    s.dtype = DType::float32;
    s.num_tokens = tokens, s.top_k = kTopK, s.hidden = kHidden, s.local_experts = local, s.capacity = capacity;
    s.alignment = 1, s.tokens = d.tokens, s.targets = d.targets, s.row_of = d.row_of, s.counts = d.counts;
    s.rows = scattered.as<char>();
    dispatch.launches.push_back([d](cudaStream_t on, const Comm& comm) { return start_kernel(kConfig, on, comm, d); });
    dispatch.results.push_back({rows, sizes, targets, row_of, row_weights, counts});
    combine.launches.push_back([c](cudaStream_t on, const Comm& comm) { return start_kernel(kConfig, on, comm, c); });
    combine.results.push_back({combined});
    scatter.launches.push_back([s](cudaStream_t on, const Comm& comm) { return start_kernel(kConfig, on, comm, s); });
    scatter.results.push_back({scattered});
  });
  cases.insert(cases.end(), {dispatch, combine, scatter});
}

void add_ragged(std::vector<Case>& cases, int ranks) {
  constexpr int kRows = 8192, kWidth = 4096;
  Case ragged{"ragged_all_to_all", {}, {}};
  on_each(ranks, [&](int rank) {
    const int slice = kRows / ranks;
    std::vector<int32_t> begins(ranks);
    for (int i = 0; i < ranks; ++i) begins[i] = i * slice;
    RaggedArgs a{};
    a.slices = 1, a.operand_rows = a.result_rows = kRows, a.row_bytes = kWidth;
    const Array result(size_t{kRows} * kWidth);
    a.operand = Array(integers(size_t{kRows} * kWidth / 4, 1 << 30)).as<char>(), a.result = result.as<char>();
    a.input_offsets = Array(begins).as<int32_t>();
    a.output_offsets = Array(std::vector<int32_t>(ranks, rank * slice)).as<int32_t>();
    a.send_sizes = a.recv_sizes = Array(std::vector<int32_t>(ranks, slice)).as<int32_t>();
    ragged.launches.push_back([a](cudaStream_t on, const Comm& comm) { return start_kernel(kConfig, on, comm, a); });
    ragged.results.push_back({result});
  });
  cases.push_back(ragged);
}

void add_sparse(std::vector<Case>& cases, int ranks) {
  constexpr int kEntries = 20'000, kRows = 100'000, kHidden = 256, kCapacity = 40'000;
  const auto ints = [](size_t count) { return Array(count * 4).as<int32_t>(); };
  Case united{"sparse_all_reduce, union", {}, {}}, summed{"sparse_all_reduce, sums", {}, {}};
  on_each(ranks, [&](int) {
    SparseUnionArgs u{};
    u.entries = kEntries, u.num_rows = kRows, u.capacity = kCapacity;
    const Array indices(kCapacity * 4), places(ranks * kEntries * 4), bounds((ranks + 1) * 4),
        result(size_t{kCapacity} * kHidden * 4);
    u.ids = Array(integers(kEntries, kRows / 4)).as<int32_t>();
    u.missing = Array(std::vector<int32_t>{0, 0}).as<int32_t>();
    u.indices = indices.as<int32_t>(), u.places = places.as<int32_t>(), u.bounds = bounds.as<int32_t>();
    u.all_missing = ints(2), u.scratch = ints(bitmap_scratch_ints(kRows));
    SparseReduceArgs r{};
    r.dtype = DType::float32;
    r.entries = kEntries, r.hidden = kHidden, r.capacity = kCapacity, r.places_kept = kCapacity, r.scale = 1;
    r.landing_room = landing_room(kEntries, ranks, /*sharded=*/false);
    r.values = Array(floats(size_t{kEntries} * kHidden)).as<char>(), r.places = u.places, r.bounds = u.bounds;
    r.result = result.as<char>(), r.runs = Array(ranks * kCapacity * sizeof(Run)).as<Run>();
    r.heads = ints(kCapacity), r.next = ints(kEntries), r.members = ints(kEntries), r.begins = ints(kCapacity);
    r.listed = ints(1), r.long_places = ints(kEntries), r.long_lists = ints(1), r.sent = ints(ranks);
    r.landing = Array(landing_bytes(ranks, kCapacity, r.landing_room, kHidden * 4)).as<char>();
    r.partials = Array(size_t{kEntries} * kHidden * 4).as<float>();
    united.launches.push_back([u](cudaStream_t on, const Comm& comm) { return start_kernel(kConfig, on, comm, u); });
    united.results.push_back({indices, places, bounds});
    summed.launches.push_back([r](cudaStream_t on, const Comm& comm) { return start_kernel(kConfig, on, comm, r); });
    summed.results.push_back({result});
  });
  cases.insert(cases.end(), {united, summed});
}

// Two streams for each rank.
using Streams = std::vector<std::array<cudaStream_t, 2>>;
using Results = std::vector<std::vector<std::vector<char>>>;

void spoil_results(const Case& op) {
  for (const auto& results : op.results)
    for (const Array& each : results) CHECK(cudaMemset(each.data, 0xff, each.bytes));
  synchronize(op.results.size());  // streams do not wait for what is set
}

Results run_alone(const Case& op, const Group& group, const Streams& streams) {
  spoil_results(op);
  on_each(group.size(), [&](int rank) { CHECK(op.launches[rank](streams[rank][0], group.comm({0, rank}))); });
  synchronize(group.size());
  Results found;
  for (const auto& results : op.results) {
    found.emplace_back();
    for (const Array& each : results) found.back().push_back(each.read());
  }
  return found;
}

bool unchanged(const Case& op, const Results& wanted) {
  for (size_t rank = 0; rank < wanted.size(); ++rank)
    for (size_t i = 0; i < wanted[rank].size(); ++i)
      if (op.results[rank][i].read() != wanted[rank][i]) return false;
  return true;
}

// Whether the op ends, with the right results, while another kernel holds `sms` of each GPU.
bool ends_beside(const Case& op, const Group& group, int sms, const Streams& streams) {
  const Results wanted = run_alone(op, group, streams);
  spoil_results(op);
  on_each(group.size(), [&](int rank) {
    delay<<<sms, 1, kSharedBytes, streams[rank][1]>>>(kHeldNs);  // every block takes a whole SM
    CHECK(cudaGetLastError());
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  const auto begin = std::chrono::steady_clock::now();
  on_each(group.size(), [&](int rank) { CHECK(op.launches[rank](streams[rank][0], group.comm({0, rank}))); });
  bool held = true;
  on_each(group.size(), [&](int rank) {
    CHECK(cudaStreamSynchronize(streams[rank][0]));
    held &= cudaStreamQuery(streams[rank][1]) == cudaErrorNotReady;
  });
  const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - begin;
  synchronize(group.size());
  const bool right = unchanged(op, wanted);
  std::printf("%-26s beside %d SMs held: %8.2f ms, %s, %s\n", op.name, sms, took.count(),
              held ? "before they are free" : "AFTER they are free", right ? "right" : "WRONG");
  return held && right;
}

}  // namespace

int main() {
  int ranks = 0, sms = 0;
  CHECK(cudaGetDeviceCount(&ranks));
  ranks = ranks < 2 ? 1 : ranks < 4 ? 2 : 4;  // of which the experts are a multiple
  std::vector<int> devices(ranks);
  std::iota(devices.begin(), devices.end(), 0);
  Group group({devices}, 20.0, /*poison=*/false);
  CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
  Streams streams(ranks);
  on_each(ranks, [&](int rank) {
    CHECK(load_kernels(kSharedBytes));
    CHECK(cudaFuncSetAttribute(delay, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
    for (cudaStream_t& stream : streams[rank]) CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  });
  std::vector<Case> cases;
  add_routed(cases, ranks, 4096);
  add_routed(cases, ranks, 128);
  add_ragged(cases, ranks);
  add_sparse(cases, ranks);
  bool good = true;
  for (const Case& op : cases) good &= ends_beside(op, group, sms - 1, streams);
  std::printf(good ? "residency: all checks passed on %d GPUs\n" : "residency: FAILED on %d GPUs\n", ranks);
  return good ? 0 : 1;
}
