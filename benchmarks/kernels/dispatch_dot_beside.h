// dispatch_ragged_dot beside a kernel that holds all SMs but a pair of every GPU.
#pragma once

#include <deque>
#include <random>
#include <vector>

#include "held_sms.h"
#include "kernels/moe/args.h"
#include "overlap_bench.h"

// The buffers of the op's spec that a call has.
struct DotBuffer {
  void** pointer;  // among the arguments
  int64_t bytes;
  bool is_result;
};
constexpr int kMostBuffers = 32;

// Host and device code, as the spec's is.
struct ListBuffers {
  DispatchDotArgs* args;
  DotBuffer* buffers;
  int* count;

  template <class T>
  JAX_EP_CONSTANT_FN void operator()(const BufferSpec& spec, T* DispatchDotArgs::* member) const {
    if (spec.present && *count < kMostBuffers)
      buffers[(*count)++] = {(void**)&(args->*member), spec.bytes(), spec.is_result()};
  }
};

// One GPU's call, with every buffer of the op's spec.
class DotRank {
 public:
  static constexpr int kTokens = 4096, kTopK = 4, kExperts = 16, kHidden = 1024, kColumns = 1024;

  DotRank(int rank, int ranks) : device_(rank) {
    CHECK(cudaSetDevice(rank));
    args_.dtype = DType::bfloat16;
    args_.num_tokens = kTokens, args_.top_k = kTopK, args_.hidden = kHidden, args_.num_experts = kExperts;
    args_.columns = kColumns, args_.capacity = ranks * kTokens * kTopK;
    OpSpec<DispatchDotArgs>::complete(args_, ranks, /*sends_ahead=*/true);
    std::vector<DotBuffer> buffers(kMostBuffers);
    int count = 0;
    OpSpec<DispatchDotArgs>::buffers(args_, ranks, ListBuffers{&args_, buffers.data(), &count});
    buffers.resize(count);
    for (const DotBuffer& each : buffers) {
      char* const data = device_array<char>(each.bytes);
      *each.pointer = data;
      all_.push_back(data);
      if (each.is_result) results_.push_back({data, static_cast<size_t>(each.bytes)});
    }
    fill(args_.tokens, int64_t{kTokens} * kHidden, 2 * rank + 1);
    fill(args_.rhs, int64_t{kExperts} / ranks * kHidden * kColumns, 2 * rank + 2);
    std::mt19937 random(rank);
    std::vector<int32_t> ids(kTokens * kTopK);
    for (int32_t& id : ids) id = static_cast<int>(random() % kExperts);
    upload(args_.expert_ids, ids);
    upload(args_.weights, std::vector<float>(kTokens * kTopK, 0.5f));
    CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  }
  ~DotRank() {
    CHECK(cudaSetDevice(device_));
    for (char* each : all_) CHECK(cudaFree(each));
    CHECK(cudaStreamDestroy(stream_));
  }
  DotRank(const DotRank&) = delete;
  DotRank& operator=(const DotRank&) = delete;

  // On fresh results, so late.
  void launch(const DotConfig& config, const Group& group, uint64_t late_ns) {
    CHECK(cudaSetDevice(device_));
    for (const auto& [data, bytes] : results_) CHECK(cudaMemsetAsync(data, 0xff, bytes, stream_));
    delay<<<1, 1, 0, stream_>>>(late_ns);
    const auto error = ProductKernel<DispatchDotArgs>::start(config, stream_, group.comm({0, device_}), args_);
    if (!error) return;
    std::printf("ERROR %s\n", error->c_str());
    std::exit(1);
  }
  std::vector<std::vector<char>> results() const {
    CHECK(cudaSetDevice(device_));
    CHECK(cudaStreamSynchronize(stream_));
    std::vector<std::vector<char>> found;
    for (const auto& [data, bytes] : results_) {
      found.emplace_back(bytes);
      CHECK(cudaMemcpy(found.back().data(), data, bytes, cudaMemcpyDeviceToHost));
    }
    return found;
  }
  DotConfig config(int ranks) const { return plan(shape_of(args_, ranks), hardware_model("sm_90")); }

 private:
  static void fill(const char* data, int64_t count, uint32_t seed) {
    fill_random<<<blocks_of(count), 256>>>(reinterpret_cast<__nv_bfloat16*>(const_cast<char*>(data)), count, seed);
    CHECK(cudaDeviceSynchronize());
  }
  template <class T>
  static void upload(const T* to, const std::vector<T>& from) {
    CHECK(cudaMemcpy(const_cast<T*>(to), from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice));
  }

  struct Result {
    char* data;
    size_t bytes;
  };
  const int device_;
  DispatchDotArgs args_{};
  std::vector<char*> all_;
  std::vector<Result> results_;
  cudaStream_t stream_{};
};

// Whether it ends before the SMs are free, with the bits of an undisturbed run.
inline bool dispatch_dot_ends_beside(Group& group) {
  std::deque<DotRank> ranks;
  for (int rank = 0; rank < group.size(); ++rank) ranks.emplace_back(rank, group.size());
  const DotConfig config = ranks.front().config(group.size());
  const auto run = [&](uint64_t late_ns) {
    for (DotRank& rank : ranks) rank.launch(config, group, late_ns);
    std::vector<std::vector<std::vector<char>>> found;
    for (const DotRank& rank : ranks) found.push_back(rank.results());
    return found;
  };
  const auto wanted = run(0);
  HeldSms sms(group.size(), /*ns=*/2'000'000'000);
  const auto found = run(/*late_ns=*/50'000'000);  // when they are held
  const bool held = sms.all_held(), right = found == wanted;
  const auto lost = group.take_error();
  const bool good = held && right && !lost;
  std::printf("%-5s %-21s beside a kernel on all SMs but a pair, %s, %s  %s %s\n", good ? "ok" : "WRONG",
              "dispatch_ragged_dot", held ? "before they are free" : "AFTER they are free", right ? "right" : "wrong",
              config.describe().c_str(), lost ? lost->message.c_str() : "");
  return good;
}
