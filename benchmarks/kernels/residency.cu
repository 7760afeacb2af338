// Whether ops end while another kernel holds all SMs but one of every GPU, with the bits of an undisturbed run. On one,
// two or four GPUs, a rank each.
//
//   cmake -S tests -B build && cmake --build build --target residency
//   build/residency
#include <cuda_runtime.h>

#include <chrono>
#include <cstdio>
#include <functional>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "held_sms.h"
#include "moe_rank.h"
#include "runtime/group.h"

namespace {

constexpr int kSharedBytes = 227 * 1024;
constexpr uint64_t kHeldNs = 2'000'000'000;
constexpr LaunchConfig kConfig{96, 256, 4, 128 + 7 * 4096};

// Memory of the current device that is read back after an op.
struct Array {
  void* data = nullptr;
  size_t bytes = 0;

  Array(void* memory, size_t size) : data(memory), bytes(size) {}
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

// The op that `Args` call, of all ranks.
template <class Args>
Launch launch_of(const Args& args) {
  return [args](cudaStream_t on, const Comm& comm) { return start_kernel(kConfig, on, comm, args); };
}

// dispatch, combine and combine's gradient of one routing.
void add_routed(std::vector<Case>& cases, int ranks, int tokens) {
  const Shape shape{tokens, /*hidden=*/1024, /*top_k=*/8, /*experts=*/64};
  const bool few = routes_by_assignments(tokens, shape.top_k);
  Case dispatch{few ? "dispatch, few tokens" : "dispatch", {}, {}},
      combine{few ? "combine, few tokens" : "combine", {}, {}},
      scatter{few ? "its gradient, few tokens" : "its gradient", {}, {}};
  on_each(ranks, [&](int rank) {
    const Rank r = make_rank(shape, rank, ranks);
    const DispatchArgs& d = r.dispatch;
    const size_t table = size_t{4} * tokens * shape.top_k, row = size_t{2} * shape.hidden;
    const Array rows(d.rows, d.capacity * row);
    dispatch.launches.push_back(launch_of(d));
    dispatch.results.push_back({rows, Array(d.group_sizes, 4 * shape.experts / ranks), Array(d.targets, table),
                                Array(d.row_of, ranks * table), Array(d.weights, ranks * table),
                                Array(d.counts, 4 * shape.experts)});
    combine.launches.push_back(launch_of(r.combine));
    combine.results.push_back({Array(r.combine.combined, tokens * row)});
    scatter.launches.push_back(launch_of(r.scatter));
    scatter.results.push_back({rows});
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
    a.slices = 1, a.operand_rows = a.output_rows = kRows, a.row_bytes = kWidth;
    const Array result(size_t{kRows} * kWidth);
    a.operand = Array(integers(size_t{kRows} * kWidth / 4, 1 << 30)).as<char>(), a.output = result.as<char>();
    a.input_offsets = Array(begins).as<int32_t>();
    a.output_offsets = Array(std::vector<int32_t>(ranks, rank * slice)).as<int32_t>();
    a.send_sizes = a.recv_sizes = Array(std::vector<int32_t>(ranks, slice)).as<int32_t>();
    ragged.launches.push_back(launch_of(a));
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
    u.all_missing = ints(2), u.coop_counts = ints(kMaxCoops);
    u.bits = Array(bitmap_words(kRows) * 4).as<uint32_t>(), u.prefix = ints(bitmap_words(kRows));
    SparseReduceArgs r{};
    r.dtype = DType::float32;
    r.entries = kEntries, r.hidden = kHidden, r.capacity = kCapacity, r.places_kept = kCapacity, r.scale = 1;
    r.landing_room = landing_room(kEntries, ranks, /*sharded=*/false);
    r.values = Array(floats(size_t{kEntries} * kHidden)).as<char>(), r.places = u.places, r.bounds = u.bounds;
    r.result = result.as<char>(), r.runs = Array(ranks * kCapacity * sizeof(Run)).as<Run>();
    r.heads = ints(kCapacity), r.next = ints(kEntries), r.list_entries = ints(kEntries), r.begins = ints(kCapacity);
    r.listed = ints(1), r.long_places = ints(kEntries), r.long_lists = ints(1), r.sent = ints(ranks);
    r.landing = Array(landing_bytes(ranks, kCapacity, r.landing_room, kHidden * 4)).as<char>();
    r.partials = Array(size_t{kEntries} * kHidden * 4).as<float>();
    united.launches.push_back(launch_of(u));
    united.results.push_back({indices, places, bounds});
    summed.launches.push_back(launch_of(r));
    summed.results.push_back({result});
  });
  cases.insert(cases.end(), {united, summed});
}

using Streams = std::vector<cudaStream_t>;  // of the ranks
using Results = std::vector<std::vector<std::vector<char>>>;

void spoil_results(const Case& op) {
  for (const auto& results : op.results)
    for (const Array& each : results) CHECK(cudaMemset(each.data, 0xff, each.bytes));
  on_each(op.results.size(), [](int) { CHECK(cudaDeviceSynchronize()); });  // streams do not wait for what is set
}

// Ends when the ranks' streams do.
void launch(const Case& op, const Group& group, const Streams& streams) {
  on_each(group.size(), [&](int rank) { CHECK(op.launches[rank](streams[rank], group.comm({0, rank}))); });
  on_each(group.size(), [&](int rank) { CHECK(cudaStreamSynchronize(streams[rank])); });
}

Results read_results(const Case& op) {
  Results found;
  for (const auto& results : op.results) {
    found.emplace_back();
    for (const Array& each : results) found.back().push_back(each.read());
  }
  return found;
}

// Whether the op ends, with the right results, while another kernel holds all SMs but one of each GPU.
bool ends_beside(const Case& op, const Group& group, const Streams& streams) {
  spoil_results(op);
  launch(op, group, streams);
  const Results wanted = read_results(op);
  spoil_results(op);
  bool held = false;
  std::chrono::duration<double, std::milli> took{};
  {
    HeldSms others(group.size(), Free::one, kHeldNs);
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    const auto begin = std::chrono::steady_clock::now();
    launch(op, group, streams);
    held = others.all_held();
    took = std::chrono::steady_clock::now() - begin;
  }
  const bool right = read_results(op) == wanted;
  std::printf("%-26s beside all SMs but one held: %8.2f ms, %s, %s\n", op.name, took.count(),
              held ? "before they are free" : "AFTER they are free", right ? "right" : "WRONG");
  return held && right;
}

}  // namespace

int main() {
  int ranks = 0;
  CHECK(cudaGetDeviceCount(&ranks));
  ranks = ranks < 2 ? 1 : ranks < 4 ? 2 : 4;  // of which the experts are a multiple
  std::vector<int> devices(ranks);
  std::iota(devices.begin(), devices.end(), 0);
  Group group({devices}, 20.0, /*poison=*/false);
  Streams streams(ranks);
  on_each(ranks, [&](int rank) {
    CHECK(load_kernels(kSharedBytes));
    CHECK(cudaStreamCreateWithFlags(&streams[rank], cudaStreamNonBlocking));
  });
  std::vector<Case> cases;
  add_routed(cases, ranks, 4096);
  add_routed(cases, ranks, 128);
  add_ragged(cases, ranks);
  add_sparse(cases, ranks);
  bool good = true;
  for (const Case& op : cases) good &= ends_beside(op, group, streams);
  std::printf(good ? "residency: all checks passed on %d GPUs\n" : "residency: FAILED on %d GPUs\n", ranks);
  return good ? 0 : 1;
}
