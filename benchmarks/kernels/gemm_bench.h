// Operands, a plain reference kernel and clocks for gemm_bench.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "runtime/cuda/grouped_matmul_launch.h"

using namespace jax_ep::gemm;

constexpr const char* kGroupings[] = {"dense", "rows", "contraction"};

inline int& wrong_cases() {
  static int count = 0;
  return count;
}

struct Case {
  Grouping grouping;
  int m, n, k;
  std::vector<int> sizes{};
  bool mn_b = true;  // rhs is stored [k, n]
  Gathered gathered = Gathered::none;
  std::vector<int> indices{};
  int source_rows = 0;
  Element in = Element::bfloat16, out = Element::bfloat16;
  Formula formula = Formula::store;

  bool mn_a() const { return grouping == Grouping::k_grouped; }  // lhs is stored [k, m]
  int groups() const { return std::max<int>(1, sizes.size()); }
  size_t a_count() const { return gathered == Gathered::lhs ? size_t(source_rows) * (mn_a() ? m : k) : size_t(m) * k; }
  size_t b_count() const {
    return gathered == Gathered::rhs ? size_t(source_rows) * n
                                     : size_t(n) * k * (grouping == Grouping::m_grouped ? groups() : 1);
  }
  size_t out_count() const { return size_t(m) * n * (grouping == Grouping::k_grouped ? groups() : 1); }
  double flops() const {
    double rows = 0;
    for (const int size : sizes) rows += size;
    if (grouping == Grouping::m_grouped) return 2 * rows * n * k * (formula == Formula::gated ? 2 : 1);
    return grouping == Grouping::k_grouped ? 2 * rows * m * n : 2.0 * m * n * k;
  }
};

// 0xffff is NaN in both 16-bit dtypes.
inline void spoil(void* data, size_t first, size_t count) {
  CHECK(cudaMemset(static_cast<char*>(data) + first * 2, 0xff, count * 2));
}

class Buffers {
 public:
  static constexpr size_t kGuard = 4096;

  Buffers(const Case& each, bool poison) : case_(each) {
    a = device_array<char>(each.a_count() * 2), b = device_array<char>(each.b_count() * 2);
    out = device_array<char>(out_bytes() + kGuard);
    sizes = upload(each.sizes), indices = upload(each.indices), counter = device_array<uint32_t>(1);
    if (each.formula == Formula::gated) {
      second_b = device_array<char>(each.b_count() * 2), kept = device_array<char>(2 * out_bytes());
      fill<<<1024, 256>>>(static_cast<__nv_bfloat16*>(second_b), each.b_count(), 5u);
    }
    each.in == Element::bfloat16 ? fill_both<__nv_bfloat16>() : fill_both<__half>();
    if (poison && !each.sizes.empty()) spoil_groups();
    CHECK(cudaDeviceSynchronize());
  }
  ~Buffers() {
    for (void* each : {a, b, out, static_cast<void*>(sizes), static_cast<void*>(counter), static_cast<void*>(indices),
                       second_b, kept})
      cudaFree(each);
  }

  size_t out_bytes() const { return case_.out_count() * (case_.out == Element::float32 ? 4 : 2); }
  const Case& of() const { return case_; }

  Config config() const {
    int sms = 0;
    CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
    return plan_tiles(product(), sms);
  }
  void run(const Config& config) {
    if (const auto error = launch(product(), config, nullptr)) {
      std::printf("ERROR %s\n", error->c_str());
      std::exit(1);
    }
  }

  // The groups one after the other; what belongs to no group is zero.
  template <class In>
  void reference(float* to, float* magnitude) const {
    CHECK(cudaMemset(to, 0, case_.out_count() * sizeof(float)));
    CHECK(cudaMemset(magnitude, 0, case_.out_count() * sizeof(float)));
    const Case& c = case_;
    const int64_t a_row = c.mn_a() ? 1 : c.k, a_k = c.mn_a() ? c.m : 1, b_col = c.mn_b ? 1 : c.k,
                  b_k = c.mn_b ? c.n : 1;
    const bool rows = c.grouping == Grouping::m_grouped, contraction = c.grouping == Grouping::k_grouped;
    int64_t start = 0;
    for (int g = 0; g < c.groups(); ++g) {
      const int size = c.sizes.empty() ? 0 : c.sizes[g], m = rows ? size : c.m, k = contraction ? size : c.k;
      const int64_t to_g = rows ? start * c.n : contraction ? int64_t{g} * c.m * c.n : 0;
      const bool left = c.gathered == Gathered::lhs, right = c.gathered == Gathered::rhs;
      const In* a_g = static_cast<const In*>(a) + (left ? 0 : start * (rows ? a_row : a_k));
      const In* b_g = static_cast<const In*>(b) + (rows ? int64_t{g} * c.n * c.k : right ? 0 : start * b_k);
      const int* at = indices + start;
      if (m)
        multiply_plainly<<<dim3((c.n + 127) / 128, m), 128>>>(
            a_g, b_g, to + to_g, magnitude + to_g, m, c.n, k, a_row, a_k, b_col, b_k, left && rows ? at : nullptr,
            left && !rows ? at : nullptr, right ? at : nullptr, c.source_rows);
      start += size;
    }
    CHECK(cudaDeviceSynchronize());
  }

  void *a = nullptr, *b = nullptr, *out = nullptr;
  int *sizes = nullptr, *indices = nullptr;
  void *second_b = nullptr, *kept = nullptr;  // of a gated product
  uint32_t* counter = nullptr;

 private:
  GroupedMatmul product() const {
    const bool gated = case_.formula == Formula::gated;
    GroupedMatmul product{};
    product.grouping = case_.grouping, product.formula = case_.formula, product.keeps_products = gated;
    product.activation = gated ? Activation::silu : Activation::none;
    product.operand_dtype = case_.in, product.dtype = case_.out, product.rhs_is_k_by_n = case_.mn_b;
    product.m = case_.m, product.n = product.columns = case_.n, product.k = case_.k, product.groups = case_.groups();
    product.lhs = a, product.rhs = b, product.second_rhs = second_b, product.result = out;
    product.first_product = kept, product.second_product = kept ? static_cast<char*>(kept) + out_bytes() : nullptr;
    product.gathered = case_.gathered, product.source_rows = case_.source_rows, product.indices = indices;
    product.group_sizes = sizes, product.counter = counter;
    return product;
  }

  // NaN in the largest group, whose neighbours must not see it, and behind the last group.
  void spoil_groups() {
    const auto largest = std::max_element(case_.sizes.begin(), case_.sizes.end());
    const size_t start = std::accumulate(case_.sizes.begin(), largest, size_t{0});
    const size_t end = std::accumulate(case_.sizes.begin(), case_.sizes.end(), size_t{0});
    const bool rows = case_.grouping == Grouping::m_grouped;
    const size_t width = rows ? case_.k : case_.m, all = rows ? case_.m : case_.k;
    if (case_.gathered != Gathered::lhs) {
      spoil(a, start * width, *largest * width);
      spoil(a, end * width, (all - end) * width);
    }
    if (!rows && case_.gathered != Gathered::rhs) spoil(b, end * case_.n, (all - end) * case_.n);
  }
  template <class In>
  void fill_both() {
    fill<<<1024, 256>>>(static_cast<In*>(a), case_.a_count(), 1u);
    fill<<<1024, 256>>>(static_cast<In*>(b), case_.b_count(), 77u);
  }

  Case case_;
};

// Medians of `rounds`, in each of which all products are launched so many times, in turns. After `rest` milliseconds of
// pause, and one launch that does not count, a GPU is cool; without a pause all are equally hot.
inline std::vector<double> milliseconds_in_turns(int rounds, int launches, int rest,
                                                 const std::vector<std::function<void()>>& runs) {
  const size_t count = runs.size();
  std::vector<std::array<cudaEvent_t, 2>> events(rounds * count);  // before and behind
  for (auto& pair : events)
    for (auto& event : pair) CHECK(cudaEventCreate(&event));
  for (const auto& run : runs) run();
  for (size_t i = 0; i < events.size(); ++i) {
    const auto& run = runs[i % count];
    if (rest) {
      CHECK(cudaDeviceSynchronize());
      std::this_thread::sleep_for(std::chrono::milliseconds(rest));
      run();
    }
    CHECK(cudaEventRecord(events[i][0]));
    for (int launch = 0; launch < launches; ++launch) run();
    CHECK(cudaEventRecord(events[i][1]));
  }
  CHECK(cudaDeviceSynchronize());
  std::vector<std::vector<float>> times(count);
  for (size_t i = 0; i < events.size(); ++i) {
    times[i % count].push_back(0);
    CHECK(cudaEventElapsedTime(&times[i % count].back(), events[i][0], events[i][1]));
    for (auto& event : events[i]) CHECK(cudaEventDestroy(event));
  }
  std::vector<double> medians;
  for (auto& of_run : times) {
    std::sort(of_run.begin(), of_run.end());
    medians.push_back(of_run[rounds / 2] / launches);
  }
  return medians;
}

inline std::vector<float> download_as(Element dtype, const void* data, size_t count) {
  if (dtype == Element::float32) return download<float>(data, count);
  return dtype == Element::bfloat16 ? download<__nv_bfloat16>(data, count) : download<__half>(data, count);
}

// What a run should have left, on the host.
struct Wanted {
  std::vector<float> values, magnitudes;
};

inline Wanted wanted_of(const Buffers& buffers) {
  const size_t count = buffers.of().out_count();
  float *exact = device_array<float>(count), *magnitude = device_array<float>(count);
  buffers.of().in == Element::bfloat16 ? buffers.reference<__nv_bfloat16>(exact, magnitude)
                                       : buffers.reference<__half>(exact, magnitude);
  Wanted wanted{download<float>(exact, count), download<float>(magnitude, count)};
  CHECK(cudaFree(exact));
  CHECK(cudaFree(magnitude));
  return wanted;
}

// In units of what rounding allows: up to 1 is right. NaN belongs where the reference has it, and nowhere else.
inline double error_of(float actual, float wanted, float magnitude, Element dtype) {
  if (std::isnan(wanted) || std::isnan(actual)) return std::isnan(wanted) && std::isnan(actual) ? 0 : 1e9;
  const double unit = dtype == Element::float32 ? 0 : dtype == Element::bfloat16 ? 1.0 / 256 : 1.0 / 2048;
  return std::fabs(actual - wanted) / (unit * std::fabs(wanted) + 1e-5 * magnitude + 1e-6);
}

// Runs once on a spoiled result; the largest error. Prints where it is wrong. Whoever contracts a whole tile has the
// bits of `alike`, those of the first such run.
inline double run_and_compare(Buffers& buffers, const Wanted& wanted, const Config& config, std::vector<float>& alike) {
  const Case& each = buffers.of();
  CHECK(cudaMemset(buffers.out, 0xff, buffers.out_bytes() + Buffers::kGuard));
  buffers.run(config);
  CHECK(cudaDeviceSynchronize());
  const auto actual = download_as(each.out, buffers.out, each.out_count());
  double worst = 0;
  size_t wrong = 0, first = 0;
  for (size_t i = 0; i < actual.size(); ++i) {
    const double error = error_of(actual[i], wanted.values[i], wanted.magnitudes[i], each.out);
    if (error > 1 && wrong++ == 0) first = i;
    worst = std::max(worst, error);
  }
  if (alike.empty()) alike = actual;
  const bool differs = !config.split_k && std::memcmp(alike.data(), actual.data(), actual.size() * sizeof(float)) != 0;
  if (differs) std::printf("  WRONG %s: other bits than those of other tiles\n", config.describe().c_str());
  std::vector<uint8_t> guard(Buffers::kGuard);
  CHECK(cudaMemcpy(guard.data(), static_cast<char*>(buffers.out) + buffers.out_bytes(), guard.size(),
                   cudaMemcpyDeviceToHost));
  const bool trespassed = std::any_of(guard.begin(), guard.end(), [](uint8_t x) { return x != 0xff; });
  if (wrong)
    std::printf("  WRONG %s: %zu of %zu, first [%zu, %zu] is %g wants %g\n", config.describe().c_str(), wrong,
                actual.size(), first / each.n, first % each.n, actual[first], wanted.values[first]);
  if (trespassed) std::printf("  WRONG %s: wrote behind the end\n", config.describe().c_str());
  wrong_cases() += wrong || trespassed || differs;
  return trespassed || differs ? 1e9 : worst;
}

// Every tile width, with narrow and wide bands, with a tile a CTA and with several, split, and with swapped operands;
// one line.
inline void compare(const Case& each) {
  Buffers buffers(each, true);
  const Wanted wanted = wanted_of(buffers);
  std::vector<float> alike;
  double worst = 0;
  const bool gathers = each.gathered != Gathered::none;
  for (const int block_n : {128, 192, 256}) {
    if (gathers && (each.grouping == Grouping::m_grouped || block_n != kGatheredColumns)) continue;
    if (block_n == 192 && each.grouping != Grouping::k_grouped) continue;
    for (const int band : {1, 8})
      for (const int ctas : {132, 4})
        worst = std::max(worst, run_and_compare(buffers, wanted, {block_n, band, ctas, false}, alike));
  }
  if (each.grouping == Grouping::m_grouped)
    for (const int band : {1, 8})
      for (const int ctas : {132, 4})
        worst = std::max(worst, run_and_compare(buffers, wanted, {256, band, ctas, false, /*swap_ab=*/true}, alike));
  if (each.grouping != Grouping::k_grouped && !gathers)
    worst = std::max(worst, run_and_compare(buffers, wanted, {128, 8, 132, /*split_k=*/true}, alike));
  std::printf("%-5s %-11s %4d x %4d x %4d %s%s %s  worst %.3g\n", worst > 1 ? "WRONG" : "ok",
              kGroupings[static_cast<int>(each.grouping)], each.m, each.n, each.k, each.mn_a() ? "M" : "K",
              each.mn_b ? "N" : "K", each.out == Element::float32 ? "float32" : "16 bits", worst);
  std::fflush(stdout);
}
