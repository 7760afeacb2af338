// The GEMM core without JAX.
//
//   cmake -S tests -B build && cmake --build build --target gemm_bench
//   build/gemm_bench check | time | sweep | rows | gathers | decoding
//
// check: 16-bit products of small shapes against a plain kernel, simple ones first, with the largest error of each.
// The others print TFLOP/s, and those of cuBLAS where it is found ($CUBLAS names the library). time: the planned tiles;
// sweep: seven tiles of fixed height; rows: groups of rows by tiles of fixed height and by swapped operands; gathers:
// rows by index beside contiguous ones; decoding: a few tokens, beside the bytes of their experts.
//
// -DJAX_EP_GEMM_DEBUG: a wait that never ends reports and traps.
#include <memory>
#include <string>

#include "gemm_bench.h"
#include "gemm_bench_cublas.h"

namespace {

constexpr int kLaunches = 5, kRounds = 5, kRestMs = 100;

void check_orders(Case each) {
  compare(each);
  if (each.grouping == Grouping::k_grouped) return;
  each.mn_b = false;
  compare(each);
  each.mn_b = true, each.out = Element::float32;
  compare(each);
}

void check_float16(Case each) {
  each.in = each.out = Element::float16;
  compare(each);
}

// Rows and contractions of `rows` indices in all, some of them -1 and some outside.
void check_gathers(int rows, int n, int k, const std::vector<int>& sizes) {
  std::mt19937 random(rows);
  const int matrix_rows = rows / 3 + 1;
  for (const bool odd : {false, true}) {
    std::uniform_int_distribution<int> row(0, matrix_rows - 1), rare(0, 40);
    std::vector<int> indices(rows);
    for (int& index : indices) {
      index = row(random);
      if (odd && rare(random) == 0) index = -1;
      if (odd && sizes.size() > 3 && rare(random) == 0) index = matrix_rows + 5;
    }
    for (const bool mn_b : {true, false})
      compare({Grouping::m_grouped, rows, n, k, sizes, mn_b, Gathered::lhs, indices, matrix_rows});
    for (const Gathered side : {Gathered::lhs, Gathered::rhs})
      compare({Grouping::k_grouped, k, n, rows, sizes, true, side, indices, matrix_rows});
  }
}

void check_all() {
  const std::vector<std::array<int, 3>> shapes{{128, 256, 64},   {128, 256, 512}, {128, 128, 128},  {64, 64, 64},
                                               {256, 512, 1024}, {8, 8, 8},       {136, 264, 72},   {1000, 776, 200},
                                               {40, 776, 1096},  {328, 776, 200}, {2048, 2304, 512}};
  for (const auto& [m, n, k] : shapes) check_orders({Grouping::none, m, n, k});
  check_float16({Grouping::none, 264, 520, 136});
  for (const int n : {256, 136, 1024}) {
    check_orders({Grouping::m_grouped, 1152, n, 128, {384, 512, 256}});  // NaN in the largest hides what is wrong there
    check_orders({Grouping::m_grouped, 1300, n, 72, {0, 1, 127, 0, 600, 317, 0}});  // 255 rows belong to no group
    check_orders({Grouping::k_grouped, 256, n, 512, {64, 256, 192}});
    check_orders({Grouping::k_grouped, 136, n, 700, {0, 1, 127, 0, 300, 17, 0}});
  }
  // Every number of rows that a group may leave to its last tile, by parts of a warp; every end of a contraction.
  check_gathers(1152, 264, 136, {384, 512, 256});
  check_gathers(1300, 136, 72, {0, 1, 127, 0, 600, 317, 0});
  check_gathers(700, 648, 256, {0, 1, 127, 0, 300, 17, 0, 200});
  std::vector<int> rows, ends;
  for (int size = 1; size <= 400; size += size % 64 < 48 ? 21 : 5) rows.push_back(size);
  for (int size = 60; size <= 84; ++size) ends.push_back(size);
  const auto total = [](const std::vector<int>& sizes) { return std::accumulate(sizes.begin(), sizes.end(), 0); };
  check_orders({Grouping::m_grouped, total(rows) + 300, 648, 200, rows});
  check_orders({Grouping::k_grouped, 264, 456, total(ends) + 9, ends});
  check_gathers(total(rows) + 30, 392, 200, rows);
  check_gathers(total(ends) + 9, 264, 456, ends);
  check_float16({Grouping::m_grouped, total(rows), 392, 200, rows});
  check_float16({Grouping::k_grouped, 264, 456, total(ends), ends});
}

// As a router draws them: every row's group at random.
std::vector<int> drawn_sizes(int rows, int groups) {
  std::mt19937 random(2);
  std::uniform_int_distribution<int> group(0, groups - 1);
  std::vector<int> sizes(groups);
  for (int row = 0; row < rows; ++row) ++sizes[group(random)];
  return sizes;
}

std::vector<int> equal_sizes(int rows, int groups) { return std::vector<int>(groups, rows / groups); }

std::vector<int> zipf_sizes(int rows, int groups) {
  double total = 0;
  for (int g = 0; g < groups; ++g) total += 1.0 / (g + 1);
  std::vector<int> sizes(groups);
  int left = rows;
  for (int g = groups - 1; g > 0; --g) left -= sizes[g] = static_cast<int>(rows / total / (g + 1));
  sizes[0] = left;
  std::mt19937 random(1);
  std::shuffle(sizes.begin(), sizes.end(), random);
  return sizes;
}

struct Kind {
  const char* name;
  std::vector<int> (*sizes)(int rows, int groups);
};
constexpr Kind kKinds[] = {{"drawn", drawn_sizes}, {"equal", equal_sizes}, {"Zipf", zipf_sizes}};

// In turns with cuBLAS, so that both meet the same clock; with groups cuBLAS computes one dense product of their size.
// `kind`: how the groups were drawn.
void time_case(const Case& each, const Cublas& cublas, const char* kind = "", const Config* config = nullptr) {
  Buffers buffers(each, false);
  const Config used = config ? *config : buffers.config();
  const auto times = milliseconds_in_turns(kRounds, kLaunches, kRestMs,
                                           {[&] { buffers.run(used); }, [&] { cublas.multiply(buffers); }});
  std::string name = std::string(kGroupings[static_cast<int>(each.grouping)]) + " " + std::to_string(each.m) + " x " +
                     std::to_string(each.n) + " x " + std::to_string(each.k);
  if (!each.sizes.empty()) name += ", " + std::to_string(each.groups()) + " " + kind;
  std::printf("%-42s %s%s %8.1f us %5.0f TFLOP/s   dense cuBLAS %5.0f   %5.1f %%   %s\n", name.c_str(),
              each.mn_a() ? "M" : "K", each.mn_b ? "N" : "K", times[0] * 1e3, each.flops() / times[0] / 1e9,
              each.flops() / times[1] / 1e9, 100 * times[1] / times[0], used.describe().c_str());
  std::fflush(stdout);
}

// By the planned tiles, or by seven of fixed height.
void time_all(bool sweep) {
  const Cublas cublas;
  const auto time = [&](const Case& each, const char* kind = "") {
    if (!sweep) return time_case(each, cublas, kind);
    for (const auto& [block_n, band] :
         std::vector<std::array<int, 2>>{{128, 8}, {192, 4}, {192, 8}, {256, 2}, {256, 4}, {256, 8}, {256, 16}}) {
      if (block_n == 192 && each.grouping != Grouping::k_grouped) continue;
      const Config config{block_n, band, 132, false};
      time_case(each, cublas, kind, &config);
    }
  };
  for (const bool mn_b : {false, true}) time({Grouping::none, 8192, 8192, 8192, {}, mn_b});
  const std::vector<std::array<int, 3>> shapes{{4096, 7168, 2048}, {5416, 1408, 6144}, {64, 7168, 18432},
                                               {128, 7168, 2048},  {512, 12288, 4096}, {512, 4096, 12288},
                                               {2048, 2880, 2880}, {5416, 6144, 1408}};
  for (const auto& [m, n, k] : shapes) time({Grouping::none, m, n, k});
  for (const Kind& kind : kKinds) {
    const std::vector<int> sizes = kind.sizes(32768, 64);
    for (const bool mn_b : {false, true}) time({Grouping::m_grouped, 32768, 4096, 7168, sizes, mn_b}, kind.name);
    time({Grouping::k_grouped, 7168, 4096, 32768, sizes}, kind.name);
    time({Grouping::k_grouped, 2048, 768, 65536, kind.sizes(65536, 128)}, kind.name);
  }
  time({Grouping::m_grouped, 8192, 7168, 4096, equal_sizes(8192, 8)}, "equal");
}

// Rows in groups, by tiles of fixed height and by those that have no more rows than they need.
void time_rows() {
  const Cublas cublas;
  const std::vector<std::array<int, 4>> shapes{
      {32768, 4096, 7168, 64},  {32768, 7168, 2048, 64}, {32768, 2048, 7168, 128},
      {32768, 7168, 2048, 128}, {65536, 768, 2048, 64},  {65536, 2048, 768, 64},
      {32768, 2880, 2880, 64},  {16384, 14336, 4096, 4}, {1024, 2048, 7168, 128}};
  for (const auto& [m, n, k, groups] : shapes)
    for (const Kind& kind : kKinds) {
      const Case each{Grouping::m_grouped, m, n, k, kind.sizes(m, groups)};
      const Config fixed = plan_fixed({each.grouping, m, n, k, groups}, 132), swapped{256, 8, 132, false, true};
      for (const Config* config : {&fixed, &swapped}) time_case(each, cublas, kind.name, config);
    }
}

// The experts' tokens, one expert after the other, as a router draws them: `top` experts a token.
std::vector<int> routed(int tokens, int top, int experts, std::vector<int>* sizes, int seed = 3) {
  std::mt19937 random(seed);
  std::vector<std::vector<int>> of(experts);
  std::vector<int> all(experts);
  std::iota(all.begin(), all.end(), 0);
  for (int token = 0; token < tokens; ++token)
    for (int j = 0; j < top; ++j) {
      std::swap(all[j], all[std::uniform_int_distribution<int>(j, experts - 1)(random)]);
      of[all[j]].push_back(token);
    }
  std::vector<int> indices;
  for (const auto& list : of) {
    sizes->push_back(list.size());
    indices.insert(indices.end(), list.begin(), list.end());
  }
  return indices;
}

// In turns: contiguous rows, those of a routing, and a random permutation.
void time_gather(const std::string& name, const Case& each, Gathered side, int tokens,
                 const std::vector<int>& routing) {
  std::vector<int> permutation(routing.size());
  std::iota(permutation.begin(), permutation.end(), 0);
  std::shuffle(permutation.begin(), permutation.end(), std::mt19937(4));
  Case by_routing = each, permuted = each;
  by_routing.gathered = permuted.gathered = side;
  by_routing.indices = routing, by_routing.source_rows = tokens;
  permuted.indices = permutation, permuted.source_rows = routing.size();
  Buffers all[] = {Buffers(each, false), Buffers(by_routing, false), Buffers(permuted, false)};
  std::vector<std::function<void()>> runs;
  for (Buffers& buffers : all) runs.push_back([&buffers, config = buffers.config()] { buffers.run(config); });
  const auto times = milliseconds_in_turns(10 + static_cast<int>(1e14 / each.flops()), 1, 0, runs);
  std::printf("%-24s contiguous %8.1f us %5.0f TFLOP/s   a routing %.3f   a permutation %.3f   %s\n", name.c_str(),
              times[0] * 1e3, each.flops() / times[0] / 1e9, times[1] / times[0], times[2] / times[0],
              all[1].config().describe().c_str());
  std::fflush(stdout);
}

// The products of a layer that can gather.
void time_gathers() {
  struct Layer {
    const char* name;
    int tokens, hidden, inner, experts, top;
  };
  for (const Layer& x : {Layer{"Qwen3", 8192, 2048, 768, 64, 8},
                         {"V3", 4096, 7168, 2048, 128, 8},
                         {"GPT-OSS", 8192, 2880, 2880, 64, 4},
                         {"Mixtral", 8192, 4096, 14336, 8, 2},
                         {"120b", 32768, 4096, 1024, 128, 8}}) {
    std::vector<int> sizes;
    const std::vector<int> routing = routed(x.tokens, x.top, x.experts, &sizes);
    const int rows = routing.size();
    const Case up{Grouping::m_grouped, rows, x.inner, x.hidden, sizes};
    Case gated = up;
    gated.formula = Formula::gated;
    const auto time = [&](const char* what, const Case& each, Gathered side) {
      time_gather(std::string(x.name) + " " + what, each, side, x.tokens, routing);
    };
    time("gated", gated, Gathered::lhs);
    time("up", up, Gathered::lhs);
    time("down transposed", {Grouping::m_grouped, rows, x.inner, x.hidden, sizes, false}, Gathered::lhs);
    time("weights of up", {Grouping::k_grouped, x.hidden, x.inner, rows, sizes}, Gathered::lhs);
    time("weights of down", {Grouping::k_grouped, x.inner, x.hidden, rows, sizes}, Gathered::rhs);
  }
}

// The products of a layer that decodes. Groups change from launch to launch, so that weights come from HBM.
void time_decoding() {
  constexpr int kHidden = 2048, kInner = 768, kExperts = 128, kTop = 8, kDraws = 6;
  for (const int tokens : {1, 8, 32, 128}) {
    std::vector<std::unique_ptr<Buffers>> gathered, gated, down;
    double bytes = 0;  // of a weight of the chosen experts
    for (int draw = 0; draw < kDraws; ++draw) {
      std::vector<int> sizes;
      const std::vector<int> routing = routed(tokens, kTop, kExperts, &sizes, draw);
      const int rows = routing.size();
      for (const int size : sizes) bytes += size > 0 ? 2.0 * kHidden * kInner / kDraws : 0;
      Case up{Grouping::m_grouped, rows, kInner, kHidden, sizes};
      up.formula = Formula::gated;
      gated.push_back(std::make_unique<Buffers>(up, false));
      up.gathered = Gathered::lhs, up.indices = routing, up.source_rows = tokens;
      gathered.push_back(std::make_unique<Buffers>(up, false));
      down.push_back(std::make_unique<Buffers>(Case{Grouping::m_grouped, rows, kHidden, kInner, sizes}, false));
    }
    const auto all = [](const auto& each) {
      return [&each] {
        for (const auto& one : each) one->run(one->config());
      };
    };
    const auto times = milliseconds_in_turns(20, 3, 0, {all(gathered), all(gated), all(down)});
    const char* names[] = {"gathered, gated", "gated", "down"};
    for (int i = 0; i < 3; ++i) {
      const double us = times[i] * 1e3 / kDraws;
      std::printf("%4d tokens, %-15s %7.1f us, %5.2f TB/s\n", tokens, names[i], us,
                  bytes * (i == 2 ? 1 : 2) / us / 1e6);
      std::fflush(stdout);
    }
  }
}

}  // namespace

int main(int count, char** words) {
  const std::string what = count > 1 ? words[1] : "check";
  if (what == "check") check_all();
  if (what == "time" || what == "sweep") time_all(what == "sweep");
  if (what == "rows") time_rows();
  if (what == "gathers") time_gathers();
  if (what == "decoding") time_decoding();
  return wrong_cases() ? 1 : 0;
}
