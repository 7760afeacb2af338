// Whether ops end while another kernel holds all SMs but one, whether ops that come on several streams keep one order,
// and whether ranks that call an op with different shapes are told. On one GPU; results must be those of an undisturbed
// run, bit for bit.
//
//   cmake -S tests -B build && cmake --build build --target residency
//   build/residency
#include <cuda_runtime.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <random>
#include <thread>
#include <type_traits>
#include <vector>

#include "check.h"
#include "kernels/signature.h"
#include "runtime/gpu/kernel_launch.h"
#include "runtime/gpu/stream_order.h"
#include "runtime/group.h"

using namespace jax_ep;

namespace {

constexpr int kHeldMs = 2000, kSharedBytes = 227 * 1024;
constexpr LaunchConfig kConfig{96, 256, 4, 128 + 7 * 4096};

// Every block takes a whole SM.
__global__ void hold(int ms) {
  extern __shared__ char memory[];
  uint64_t begin, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  memory[threadIdx.x] = 0;
  do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  while (now - begin < uint64_t(ms) * 1'000'000);
}

// Device memory that is read back after an op.
struct Array {
  void* data = nullptr;
  size_t bytes = 0;

  explicit Array(size_t size, int byte = 0xff) : bytes(size) {
    CHECK(cudaMalloc(&data, std::max<size_t>(size, 16)));
    CHECK(cudaMemset(data, byte, std::max<size_t>(size, 16)));
  }
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

struct Case {
  const char* name;
  std::function<cudaError_t(cudaStream_t, const Comm&)> launch;
  std::vector<Array> results;
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

template <class Args>
cudaError_t start(const LaunchConfig& config, cudaStream_t stream, const Comm& comm, const Args& args) {
  using Row = std::conditional_t<kHasRows<Args>, float, void>;
  return Kernel<Row, Args>::start(config, stream, comm, args);
}

// dispatch, combine and combine's gradient of one routing.
void add_routed(std::vector<Case>& cases, int tokens) {
  constexpr int kTopK = 8, kHidden = 1024, kExperts = 64;
  const int capacity = tokens * kTopK;
  const size_t table = size_t{1} * tokens * kTopK, row = kHidden * sizeof(float);
  DispatchArgs d{};
  d.dtype = DType::float32;
  d.num_tokens = tokens, d.top_k = kTopK, d.hidden = kHidden, d.num_experts = kExperts, d.capacity = capacity;
  d.alignment = 1, d.few = are_few(tokens, kTopK), d.early = early_tokens(tokens, kTopK, false, false);
  const Array received(capacity * row), sizes(kExperts * 4), targets(table * 4), rows(table * 4), arrived(table * 4),
      counts(kExperts * 4), combined(tokens * row), scattered(capacity * row);
  d.tokens = Array(floats(size_t{1} * tokens * kHidden)).as<char>();
  d.expert_ids = Array(integers(table, kExperts)).as<int32_t>(), d.weights = Array(floats(table)).as<float>();
  d.received = received.as<char>(), d.group_sizes = sizes.as<int32_t>(), d.targets = targets.as<int32_t>();
  d.rows = rows.as<int32_t>(), d.arrived = arrived.as<float>(), d.counts = counts.as<int32_t>();
  d.dropped = Array(4).as<int32_t>(), d.invalid = Array(4).as<int32_t>();
  d.scratch = Array(route_scratch_ints(kExperts, kMaxRanks) * 4).as<int32_t>(),
  d.landing = Array(tokens * row).as<char>();
  CombineArgs c{};
  c.dtype = DType::float32;
  c.num_tokens = tokens, c.top_k = kTopK, c.hidden = kHidden, c.capacity = capacity;
  c.outputs = d.received, c.weights = d.arrived, c.targets = d.targets, c.rows = d.rows;
  c.combined = combined.as<char>(), c.landing = Array(tokens * row).as<char>();
  ScatterArgs s{};
  s.dtype = DType::float32;
  s.num_tokens = tokens, s.top_k = kTopK, s.hidden = kHidden, s.local_experts = kExperts, s.capacity = capacity;
  s.alignment = 1, s.tokens = d.tokens, s.targets = d.targets, s.rows = d.rows, s.counts = d.counts;
  s.received = scattered.as<char>();
  const bool few = tokens <= kFewTokens;
  cases.push_back({few ? "dispatch, few tokens" : "dispatch",
                   [d](cudaStream_t on, const Comm& comm) { return start(kConfig, on, comm, d); },
                   {received, sizes, targets, rows, arrived, counts}});
  cases.push_back({few ? "combine, few tokens" : "combine",
                   [c](cudaStream_t on, const Comm& comm) { return start(kConfig, on, comm, c); },
                   {combined}});
  cases.push_back({few ? "its gradient, few tokens" : "its gradient",
                   [s](cudaStream_t on, const Comm& comm) { return start(kConfig, on, comm, s); },
                   {scattered}});
}

void add_ragged(std::vector<Case>& cases) {
  constexpr int kRows = 8192, kWidth = 4096;
  RaggedArgs a{};
  a.slices = 1, a.operand_rows = a.result_rows = kRows, a.row_bytes = kWidth;
  const Array result(size_t{kRows} * kWidth);
  a.operand = Array(integers(size_t{kRows} * kWidth / 4, 1 << 30)).as<char>(), a.result = result.as<char>();
  a.input_offsets = a.output_offsets = Array(std::vector<int32_t>{0}).as<int32_t>();
  a.send_sizes = a.recv_sizes = Array(std::vector<int32_t>{kRows}).as<int32_t>();
  cases.push_back(
      {"ragged_all_to_all", [a](cudaStream_t on, const Comm& comm) { return start(kConfig, on, comm, a); }, {result}});
}

void add_sparse(std::vector<Case>& cases) {
  constexpr int kEntries = 20'000, kRows = 100'000, kHidden = 256, kCapacity = 20'000;
  const auto ints = [](size_t count) { return Array(count * 4).as<int32_t>(); };
  SparseUnionArgs u{};
  u.entries = kEntries, u.num_rows = kRows, u.capacity = kCapacity;
  const Array indices(kCapacity * 4), slots(kEntries * 4), bounds(2 * 4), result(size_t{kCapacity} * kHidden * 4);
  u.ids = Array(integers(kEntries, kRows / 2)).as<int32_t>();
  u.missing = Array(std::vector<int32_t>{0, 0}).as<int32_t>();
  u.indices = indices.as<int32_t>(), u.slots = slots.as<int32_t>(), u.bounds = bounds.as<int32_t>();
  u.all_missing = ints(2), u.scratch = ints(bitmap_scratch_ints(kRows));
  SparseReduceArgs r{};
  r.dtype = DType::float32;
  r.entries = kEntries, r.hidden = kHidden, r.capacity = kCapacity, r.slots_kept = kCapacity, r.scale = 1;
  r.values = Array(floats(size_t{kEntries} * kHidden)).as<char>(), r.slots = u.slots, r.bounds = u.bounds;
  r.result = result.as<char>(), r.runs = Array(kCapacity * sizeof(Run)).as<Run>();
  r.heads = ints(kCapacity), r.next = ints(kEntries), r.members = ints(kEntries), r.begins = ints(kCapacity);
  r.listed = ints(1), r.long_slots = ints(kEntries), r.long_lists = ints(1), r.sent = ints(1);
  r.landing = Array(landing_bytes(1, kCapacity, 0, kHidden * 4)).as<char>();
  r.partials = Array(size_t{kEntries} * kHidden * 4).as<float>();
  cases.push_back({"sparse_all_reduce, union",
                   [u](cudaStream_t on, const Comm& comm) { return start(kConfig, on, comm, u); },
                   {indices, slots, bounds}});
  cases.push_back({"sparse_all_reduce, sums",
                   [r](cudaStream_t on, const Comm& comm) { return start(kConfig, on, comm, r); },
                   {result}});
}

std::vector<std::vector<char>> run_alone(const Case& op, const Group& group, cudaStream_t stream) {
  for (const Array& each : op.results) CHECK(cudaMemset(each.data, 0xff, each.bytes));
  CHECK(cudaDeviceSynchronize());  // the stream does not wait for what is set
  CHECK(op.launch(stream, group.comm({0, 0})));
  CHECK(cudaStreamSynchronize(stream));
  std::vector<std::vector<char>> found;
  for (const Array& each : op.results) found.push_back(each.read());
  return found;
}

bool unchanged(const Case& op, const std::vector<std::vector<char>>& wanted) {
  for (size_t i = 0; i < wanted.size(); ++i)
    if (op.results[i].read() != wanted[i]) return false;
  return true;
}

// Whether the op ends, with the right results, while another kernel holds `sms`.
bool ends_beside(const Case& op, const Group& group, int sms, cudaStream_t stream, cudaStream_t other) {
  const auto wanted = run_alone(op, group, stream);
  for (const Array& each : op.results) CHECK(cudaMemset(each.data, 0xff, each.bytes));
  CHECK(cudaDeviceSynchronize());
  hold<<<sms, 1, kSharedBytes, other>>>(kHeldMs);
  CHECK(cudaGetLastError());
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  const auto begin = std::chrono::steady_clock::now();
  CHECK(op.launch(stream, group.comm({0, 0})));
  CHECK(cudaStreamSynchronize(stream));
  const bool held = cudaStreamQuery(other) == cudaErrorNotReady;
  const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - begin;
  const bool right = unchanged(op, wanted);
  CHECK(cudaDeviceSynchronize());
  std::printf("%-26s beside %d SMs held: %8.2f ms, %s, %s\n", op.name, sms, took.count(),
              held ? "before they are free" : "AFTER they are free", right ? "right" : "WRONG");
  return held && right;
}

// Whether ops that come on two streams in turns are right every time. Without order they overlap.
bool keep_order(const std::vector<Case>& cases, Group& group, int times, cudaStream_t (&streams)[2]) {
  gpu::StreamOrder order;
  std::vector<std::vector<std::vector<char>>> wanted;
  for (const Case& op : cases) wanted.push_back(run_alone(op, group, streams[0]));
  int wrong = 0;
  for (int i = 0; i < times; ++i) {
    for (size_t op = 0; op < cases.size(); ++op) {
      const cudaStream_t stream = streams[(i + op) % 2];
      const gpu::StreamOrder::Turn turn(order, stream);
      CHECK(cases[op].launch(stream, group.comm({0, 0})));
    }
    if (i % 50 != 49) continue;
    CHECK(cudaDeviceSynchronize());
    for (size_t op = 0; op < cases.size(); ++op) wrong += !unchanged(cases[op], wanted[op]);
  }
  const auto error = group.take_error();
  std::printf("%d x %zu ops on two streams, poisoned: %d wrong%s\n", times, cases.size(), wrong,
              error ? ("; " + error->kind + ": " + error->message).c_str() : "");
  return wrong == 0 && !error;
}

// Two ranks on this GPU call an op with different shapes: both fail before anything is sent, long before the timeout.
bool mismatch_is_named(cudaStream_t (&streams)[2]) {
  Group group({{0, 0}}, 20.0, /*poison=*/false);
  constexpr LaunchConfig kSmall{32, 256, 4, 128 + 7 * 4096};
  const auto begin = std::chrono::steady_clock::now();
  RaggedArgs calls[2]{};
  for (int rank = 0; rank < 2; ++rank) {
    RaggedArgs& a = calls[rank];
    a.slices = 1, a.operand_rows = a.result_rows = 1000 * (rank + 1), a.row_bytes = 64;
    a.operand = Array(a.operand_rows * 64).as<char>(), a.result = Array(a.operand_rows * 64).as<char>();
    a.input_offsets = a.output_offsets = a.send_sizes = a.recv_sizes = Array(std::vector<int32_t>{0, 0}).as<int32_t>();
  }
  CHECK(cudaDeviceSynchronize());  // the streams do not wait for what is copied
  for (int rank = 0; rank < 2; ++rank) {
    Comm comm = group.comm({0, rank});
    comm.signature = signature_of(calls[rank]);
    comm.tag = tag_of(comm.signature);
    CHECK(start(kSmall, streams[rank], comm, calls[rank]));
  }
  CHECK(cudaDeviceSynchronize());
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  const auto error = group.take_error();
  std::printf("two ranks that differ, after %.2f s: %s\n", took.count(),
              error ? (error->kind + ": " + error->message).c_str() : "NO ERROR");
  return error && error->kind == "MismatchError" && error->message.find("operand rows=1000") != std::string::npos &&
         error->message.find("operand rows=2000") != std::string::npos;
}

}  // namespace

int main() {
  Group group({{0}}, 20.0, /*poison=*/false), poisoned({{0}}, 20.0, /*poison=*/true);
  CHECK(cudaSetDevice(0));
  CHECK(load_kernels(kSharedBytes));
  CHECK(cudaFuncSetAttribute(hold, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
  cudaStream_t streams[2];
  for (cudaStream_t& stream : streams) CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  int sms = 0;
  CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
  std::vector<Case> cases;
  add_routed(cases, 4096);
  add_routed(cases, 128);
  add_ragged(cases);
  add_sparse(cases);
  bool good = true;
  for (const Case& op : cases) good &= ends_beside(op, group, sms - 1, streams[0], streams[1]);
  good &= keep_order(cases, poisoned, 1000, streams);
  good &= mismatch_is_named(streams);
  std::puts(good ? "residency: all checks passed" : "residency: FAILED");
  return good ? 0 : 1;
}
