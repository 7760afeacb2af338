// Products of float8 operands for gemm_bench: tiles of fixed height beside those of no more rows than they need.
#pragma once

#include "gemm_bench.h"

struct Float8Case {
  int m, n, k;
  std::vector<int> sizes;
  DType out;

  int groups() const { return static_cast<int>(sizes.size()); }
  size_t out_bytes() const { return size_t(m) * n * (out == DType::float32 ? 4 : 2); }
  double flops() const { return 2.0 * std::accumulate(sizes.begin(), sizes.end(), 0.0) * n * k; }
};

// Every value of e4m3 but NaN, and scales in [0.5, 1.5).
__global__ void fill_float8(uint8_t* data, size_t count, uint32_t seed) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count; i += size_t{gridDim.x} * blockDim.x) {
    uint32_t x = static_cast<uint32_t>(i) * 2654435761u + seed;
    x = (x ^ x >> 16) * 0x7feb352du;
    x ^= x >> 15;
    data[i] = (x & 0x7f) == 0x7f ? 0 : x & 0xff;
  }
}
__global__ void fill_scales(float* data, size_t count, uint32_t seed) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count; i += size_t{gridDim.x} * blockDim.x) {
    uint32_t x = static_cast<uint32_t>(i) * 2654435761u + seed;
    x = (x ^ x >> 16) * 0x7feb352du;
    data[i] = 0.5f + float((x ^ x >> 15) >> 8) / (1 << 24);
  }
}

class Float8Buffers {
 public:
  explicit Float8Buffers(const Float8Case& each) : case_(each) {
    const size_t blocks = each.k / 128, of_weights = size_t(each.groups()) * (each.n / 128) * blocks;
    a = allocate<uint8_t>(size_t(each.m) * each.k);
    b = allocate<uint8_t>(size_t(each.groups()) * each.n * each.k);
    a_scales = allocate<float>(each.m * blocks);
    b_scales = allocate<float>(of_weights);
    out = allocate<char>(each.out_bytes() + Buffers::kGuard);
    sizes = allocate<int>(each.groups());
    counter = allocate<uint32_t>(1);
    CHECK(cudaMemcpy(sizes, each.sizes.data(), each.sizes.size() * sizeof(int), cudaMemcpyHostToDevice));
    fill_float8<<<1024, 256>>>(a, size_t(each.m) * each.k, 1u);
    fill_float8<<<1024, 256>>>(b, size_t(each.groups()) * each.n * each.k, 77u);
    fill_scales<<<1024, 256>>>(a_scales, each.m * blocks, 5u);
    fill_scales<<<1024, 256>>>(b_scales, of_weights, 9u);
    CHECK(cudaDeviceSynchronize());
  }
  Float8Buffers(const Float8Buffers&) = delete;
  ~Float8Buffers() {
    for (void* each : all_) cudaFree(each);
  }

  void run(const Config& config) {
    const Float8Arguments arguments{case_.m, case_.n,  case_.k, case_.groups(), case_.out, a, a_scales,
                                    b,       b_scales, out,     sizes,          counter};
    if (const auto error = launch(arguments, config, nullptr)) {
      std::printf("ERROR %s\n", error->c_str());
      std::exit(1);
    }
  }

  // What a run leaves in a spoiled result, and behind it.
  std::vector<char> result(const Config& config) {
    std::vector<char> bytes(case_.out_bytes() + Buffers::kGuard);
    CHECK(cudaMemset(out, 0xff, bytes.size()));
    run(config);
    CHECK(cudaMemcpy(bytes.data(), out, bytes.size(), cudaMemcpyDeviceToHost));
    return bytes;
  }

 private:
  template <class T>
  T* allocate(size_t count) {
    void* memory = nullptr;
    CHECK(cudaMalloc(&memory, count * sizeof(T)));
    all_.push_back(memory);
    return static_cast<T*>(memory);
  }

  Float8Case case_;
  std::vector<void*> all_;
  uint8_t *a, *b;
  float *a_scales, *b_scales;
  char* out;
  int* sizes;
  uint32_t* counter;
};

inline Config fixed_float8(int band, int blocks) { return {kFloat8Columns, band, blocks, false}; }
inline Config swapped_float8(int band, int blocks) { return {kFloat8Rows, band, blocks, false, /*swap_ab=*/true}; }

// Both kinds of tiles, with narrow and wide bands, with few CTAs and with many, give the same bits; one line.
inline void compare_float8(const Float8Case& each) {
  Float8Buffers buffers(each);
  const std::vector<char> wanted = buffers.result(fixed_float8(8, 132));
  size_t wrong = 0;
  for (const int band : {1, 8})
    for (const int blocks : {132, 4})
      for (int repeat = 0; repeat < 3; ++repeat) {
        const std::vector<char> found = buffers.result(swapped_float8(band, blocks));
        for (size_t i = 0; i < found.size(); ++i) wrong += found[i] != wanted[i];
      }
  std::printf("%-5s float8 %5d x %4d x %4d, %2d groups, %s: %zu bytes differ\n", wrong ? "WRONG" : "ok", each.m, each.n,
              each.k, each.groups(), each.out == DType::float32 ? "float32" : "16 bits", wrong);
  std::fflush(stdout);
  wrong_cases() += wrong > 0;
}

// In turns without rests, so that both meet the clock of a GPU that is busy.
inline void time_float8(const char* kind, const Float8Case& each) {
  constexpr int kRounds = 9, kRepeats = 10;
  Float8Buffers buffers(each);
  cudaEvent_t begin, end;
  CHECK(cudaEventCreate(&begin));
  CHECK(cudaEventCreate(&end));
  std::vector<float> times[2];
  for (int round = 0; round < kRounds; ++round)
    for (const bool swapped : {false, true}) {
      const Config config = swapped ? swapped_float8(8, 132) : fixed_float8(8, 132);
      buffers.run(config);
      CHECK(cudaEventRecord(begin));
      for (int i = 0; i < kRepeats; ++i) buffers.run(config);
      CHECK(cudaEventRecord(end));
      CHECK(cudaEventSynchronize(end));
      float total = 0;
      CHECK(cudaEventElapsedTime(&total, begin, end));
      if (round > 1) times[swapped].push_back(total / kRepeats);
    }
  for (auto& each_kind : times) std::sort(each_kind.begin(), each_kind.end());
  const double fixed = times[0][times[0].size() / 2], swapped = times[1][times[1].size() / 2];
  std::printf(
      "float8 %5d x %4d x %4d, %3d %-5s  fixed %8.1f us %5.0f TFLOP/s   swapped %8.1f us %5.0f TFLOP/s   %.3f\n",
      each.m, each.n, each.k, each.groups(), kind, fixed * 1e3, each.flops() / fixed / 1e9, swapped * 1e3,
      each.flops() / swapped / 1e9, fixed / swapped);
  std::fflush(stdout);
}
