// Products overlapped with their collective, without JAX: the first GPUs of this machine are ranks. `check` compares
// every op with exact results, with delayed ranks too; `beside` runs them while another kernel holds all SMs but a
// pair; `time`, `bands`, `ctas` and `sweep` time them inside CUDA graphs beside the product alone, all but the first
// in other configurations too.
//
//   cmake -S tests -B build && cmake --build build --target overlap_bench
//   build/overlap_bench check 2 && build/overlap_bench time 2
#include <numeric>
#include <string>

#include "graph_times.h"
#include "held_sms.h"
#include "overlap_bench.h"

namespace {

using Counts = std::vector<int>;  // of CTAs that communicate
constexpr OpKind kOps[] = {OpKind::matmul_all_reduce, OpKind::matmul_reduce_scatter, OpKind::all_gather_matmul};
bool failed = false;

struct Case {
  OpKind op;
  Shape shape;
  bool transpose_rhs;
  DType dtype;

  bool gathers() const { return op == OpKind::all_gather_matmul; }
  int rows_of_result(int ranks) const { return op == OpKind::matmul_reduce_scatter ? shape.m / ranks : shape.m; }
  CollectiveMatmulShape shape_for(int ranks) const {
    return {op, shape.m, shape.n, shape.k, gathers() ? 2 : size_of(dtype), ranks};
  }
  static HardwareModel hopper() { return hardware_model(132, 232448, 32); }
  OverlapConfig config(int ranks, int block_n, int communicating) const {
    return plan_overlap_with(shape_for(ranks), hopper(), block_n, communicating);
  }
  OverlapConfig choice(int ranks) const { return plan_overlap(shape_for(ranks), hopper()); }
};

std::vector<Rank> make_ranks(const Case& c, int count) {
  std::vector<Rank> ranks;
  for (int i = 0; i < count; ++i) ranks.emplace_back(c.shape, i, count, c.transpose_rhs);
  return ranks;
}
void release(std::vector<Rank>& ranks) {
  for (Rank& rank : ranks) rank.release();
}

void launch(const Case& c, const Group& group, const std::vector<Rank>& ranks, int rank, const OverlapConfig& config) {
  const Comm& comm = group.comm({0, rank});
  const auto error = c.gathers() ? OverlapKernel<AllGatherMatmulArgs>::start(config, ranks[rank].stream, comm,
                                                                             ranks[rank].gather_args(c.dtype))
                                 : OverlapKernel<MatmulReduceArgs>::start(
                                       config, ranks[rank].stream, comm,
                                       ranks[rank].reduce_args(c.op == OpKind::matmul_reduce_scatter, c.dtype));
  if (!error) return;
  std::printf("ERROR %s\n", error->c_str());
  std::exit(1);
}

// What every rank's result should be, and the size of what was added up.
struct Exact {
  std::vector<double> sum, size;
};
std::vector<Exact> exact_results(const Case& c, const std::vector<Rank>& ranks) {
  const int count = ranks.size();
  const int64_t all = int64_t{c.shape.m} * c.shape.n;
  std::vector<Exact> results(count);
  Exact total{std::vector<double>(all), std::vector<double>(all)};
  for (int r = 0; r < count; ++r) {
    if (c.gathers()) {
      for (int source = 0; source < count; ++source)
        for (const float x : exact_product(ranks[source], ranks[r], r, c.shape.m / count)) {
          results[r].sum.push_back(x);
          results[r].size.push_back(std::fabs(x));
        }
      continue;
    }
    const std::vector<float> product = exact_product(ranks[r], ranks[r], r, c.shape.m);
    for (int64_t i = 0; i < all; ++i) total.sum[i] += product[i], total.size[i] += std::fabs(product[i]);
  }
  if (c.gathers()) return results;
  const int64_t share = int64_t{c.rows_of_result(count)} * c.shape.n;
  for (int r = 0; r < count; ++r) {
    const int64_t begin = c.op == OpKind::matmul_reduce_scatter ? r * share : 0;
    results[r].sum.assign(total.sum.begin() + begin, total.sum.begin() + begin + share);
    results[r].size.assign(total.size.begin() + begin, total.size.begin() + begin + share);
  }
  return results;
}

// Runs a few times, some ranks late, and compares every value; the bits must be the same each time.
void check_case(const Case& c, Group& group, std::vector<Rank>& ranks, const std::vector<Exact>& exact,
                const OverlapConfig& config) {
  const int count = ranks.size();
  double worst = 0;
  int64_t wrong = 0, changed = 0;
  std::vector<std::vector<float>> first(count);
  for (int run = 0; run < 4; ++run) {
    on_each(count, [&](int r) {
      CHECK(cudaMemset(ranks[r].result, 0xff, int64_t{c.shape.m} * c.shape.n * 4));
      CHECK(cudaMemset(ranks[r].partial, 0xff, int64_t{c.shape.m} * c.shape.n * 4));
      CHECK(cudaMemset(ranks[r].gathered, 0xff, int64_t{c.shape.m} * c.shape.k * 2));
      CHECK(cudaDeviceSynchronize());
    });
    on_each(count, [&](int r) {
      if (run > 0) delay<<<1, 1, 0, ranks[r].stream>>>((r * 7 + run * 3) % 5 * 100'000);
      launch(c, group, ranks, r, config);
    });
    synchronize(ranks);
    on_each(count, [&](int r) {
      const std::vector<float> actual = download_as(c.dtype, ranks[r].result, exact[r].sum.size());
      for (size_t i = 0; i < actual.size(); ++i) {
        const double unit = c.dtype == DType::float32 ? 1e-5 : 1.0 / 256;
        const double allowed = unit * (std::fabs(exact[r].sum[i]) + exact[r].size[i]) + 1e-5 * c.shape.k;
        const double error = std::fabs(actual[i] - exact[r].sum[i]) / allowed;
        if (!(error <= 1)) ++wrong;
        worst = std::isnan(error) ? 1e9 : std::max(worst, error);
        if (run > 0 && std::memcmp(&actual[i], &first[r][i], 4)) ++changed;
      }
      if (run == 0) first[r] = actual;
    });
  }
  const auto lost = group.take_error();
  const bool bad = wrong || changed || lost;
  failed |= bad;
  std::printf("%-5s %-21s %5d x %5d x %5d %s %s  worst %.3g, wrong %lld, changed %lld  %s%s\n", bad ? "WRONG" : "ok",
              name_of(c.op), c.shape.m, c.shape.k, c.shape.n, c.transpose_rhs ? "NK" : "KN",
              c.dtype == DType::float32 ? "float32" : "16 bits", worst, static_cast<long long>(wrong),
              static_cast<long long>(changed), config.describe().c_str(), lost ? lost->message.c_str() : "");
  std::fflush(stdout);
  if (lost) std::exit(1);
}

Counts checked_counts(OpKind op, int ranks) {
  if (op == OpKind::all_gather_matmul) return {2, 16};
  return ranks == 2 ? Counts{0, 2, 98} : Counts{2, 98};
}

void check_all(Group& group) {
  const int ranks = group.size();
  const std::vector<Shape> shapes{{128 * ranks, 64, 256},  {8 * ranks, 64, 64},      {256 * ranks, 128, 512},
                                  {66 * ranks, 72, 136},   {333 * ranks, 200, 264},  {64 * ranks, 1096, 328},
                                  {16 * ranks, 1096, 328}, {1354 * ranks, 512, 1408}};
  for (const OpKind op : kOps)
    for (const Shape& shape : shapes)
      for (const bool transpose_rhs : {false, true})
        for (const DType dtype : {DType::bfloat16, DType::float32}) {
          if (transpose_rhs && dtype == DType::float32) continue;
          const Case c{op, shape, transpose_rhs, dtype};
          std::vector<Rank> all = make_ranks(c, ranks);
          const std::vector<Exact> exact = exact_results(c, all);
          for (const int block_n : {128, 256})
            for (const int communicating : checked_counts(op, ranks))
              check_case(c, group, all, exact, c.config(ranks, block_n, communicating));
          release(all);
        }
}

// The product alone, by the core of its own.
double time_product(const Case& c, const std::vector<Rank>& ranks) {
  return time_graphs(ranks, [&](int r) {
    gemm::GroupedMatmul x{};
    x.grouping = gemm::Grouping::none;
    x.m = c.shape.m, x.n = x.columns = c.shape.n, x.k = c.shape.k, x.groups = 1;
    x.operand_dtype = x.dtype = gemm::Element::bfloat16;
    x.rhs_is_k_by_n = !c.transpose_rhs;
    x.lhs = ranks[r].gathered, x.rhs = ranks[r].b, x.result = ranks[r].partial;
    if (const auto error = gemm::launch(x, ranks[r].stream)) std::printf("ERROR %s\n", error->c_str());
  });
}

double time_op(const Case& c, Group& group, const std::vector<Rank>& ranks, const OverlapConfig& config) {
  const double us = time_graphs(ranks, [&](int r) { launch(c, group, ranks, r, config); });
  if (const auto lost = group.take_error()) {
    std::printf("FAILED %s\n", lost->message.c_str());
    std::exit(1);
  }
  return us;
}

enum class Configs { planned, bands, ctas, all };

void time_case(const Case& c, Group& group, Configs configs) {
  const int count = group.size();
  std::vector<Rank> ranks = make_ranks(c, count);
  on_each(count, [&](int r) {  // the product alone reads what is gathered
    CHECK(cudaMemcpy(ranks[r].gathered, ranks[r].a, int64_t{c.shape.m} * c.shape.k * 2, cudaMemcpyDeviceToDevice));
  });
  const double product = time_product(c, ranks);
  Case thin = c;  // hardly a product: a gather still moves its whole rows, so it has few columns instead
  (c.gathers() ? thin.shape.n : thin.shape.k) = 64;
  std::vector<Rank> thin_ranks = make_ranks(thin, count);
  const OverlapConfig planned = c.choice(count);
  const double moving = time_op(thin, group, thin_ranks, thin.config(count, 128, planned.communicating));
  release(thin_ranks);
  const auto print = [&](const char* what, const OverlapConfig& config) {
    const double us = time_op(c, group, ranks, config);
    std::printf("%-7s %-21s %5d x %5d x %5d  %8.1f us, %.3f x the product's %.1f, moving %.1f, overlap %.0f %%  %s\n",
                what, name_of(c.op), c.shape.m, c.shape.k, c.shape.n, us, us / product, product, moving,
                100 * (product + moving - us) / std::min(product, moving), config.describe().c_str());
    std::fflush(stdout);
  };
  print("planned", planned);
  const auto vary = [&](int OverlapConfig::* setting, const Counts& values) {
    for (const int value : values) {
      OverlapConfig config = planned;
      config.*setting = value;
      print("", config);
    }
  };
  if (configs == Configs::bands) vary(&OverlapConfig::band, {1, 2, 4, 8, 16});
  if (configs == Configs::ctas && planned.communicating > 0)
    vary(&OverlapConfig::communicating, {16, 24, 36, 48, 66, 98, 132});
  if (configs == Configs::all)
    for (const int block_n : {128, 256})
      for (const int communicating : c.gathers() ? Counts{24, 36, 66, 132} : Counts{16, 32, 48, 66, 98, 132})
        for (const int factor : {1, 2}) {
          OverlapConfig config = c.config(count, block_n, communicating);
          config.band *= factor;
          print("", config);
        }
  release(ranks);
}

// The results of all ranks, each launched `late_ns` late.
std::vector<std::vector<float>> run_once(const Case& c, const Group& group, std::vector<Rank>& ranks,
                                         const OverlapConfig& config, uint64_t late_ns) {
  const int64_t values = int64_t{c.rows_of_result(ranks.size())} * c.shape.n;
  std::vector<std::vector<float>> found;
  on_each(ranks.size(), [&](int r) {
    CHECK(cudaMemsetAsync(ranks[r].result, 0xff, values * 4, ranks[r].stream));
    delay<<<1, 1, 0, ranks[r].stream>>>(late_ns);
    launch(c, group, ranks, r, config);
  });
  synchronize(ranks);
  for (size_t r = 0; r < ranks.size(); ++r) found.push_back(download_as(c.dtype, ranks[r].result, values));
  return found;
}

// Whether an op ends, with the bits of an undisturbed run, while another kernel holds all SMs but a pair on every GPU.
void check_beside(const Case& c, Group& group, int communicating) {
  const OverlapConfig config = c.config(group.size(), 128, communicating);
  std::vector<Rank> ranks = make_ranks(c, group.size());
  const auto wanted = run_once(c, group, ranks, config, 0);
  HeldSms sms(group.size(), Free::pair, /*ns=*/2'000'000'000);
  const auto found = run_once(c, group, ranks, config, /*late_ns=*/50'000'000);  // when they are held
  const bool held = sms.all_held(), right = found == wanted;
  const auto lost = group.take_error();
  const bool bad = !right || !held || lost;
  failed |= bad;
  std::printf("%-5s %-21s beside a kernel on all SMs but a pair, %s, %s  %s %s\n", bad ? "WRONG" : "ok", name_of(c.op),
              held ? "before they are free" : "AFTER they are free", right ? "right" : "wrong",
              config.describe().c_str(), lost ? lost->message.c_str() : "");
  release(ranks);
}

}  // namespace

int main(int count, char** arguments) {
  const std::string what = count > 1 ? arguments[1] : "check";
  const int ranks = count > 2 ? std::atoi(arguments[2]) : 2;
  std::vector<int> devices(ranks);
  std::iota(devices.begin(), devices.end(), 0);
  Group group({devices}, 5.0, /*poison=*/false);
  on_each(ranks, [](int) {
    CHECK(OverlapKernel<MatmulReduceArgs>::load());
    CHECK(OverlapKernel<AllGatherMatmulArgs>::load());
    CHECK(gemm::load());
    delay<<<1, 1>>>(1);
    CHECK(cudaDeviceSynchronize());
  });
  if (what == "check") {
    check_all(group);
  } else if (what == "beside") {
    for (const OpKind op : kOps)
      for (const int communicating : checked_counts(op, ranks))
        check_beside({op, {4096, 1024, 4096}, false, DType::bfloat16}, group, communicating);
  } else {
    const Configs configs = what == "sweep"   ? Configs::all
                            : what == "bands" ? Configs::bands
                            : what == "ctas"  ? Configs::ctas
                                              : Configs::planned;
    for (const OpKind op : kOps) time_case({op, {5416, 6144, 1408}, false, DType::bfloat16}, group, configs);
    // Shapes of a gather's product; those of the reductions have k and n swapped.
    std::vector<Shape> shapes{{64, 7168, 18432},  {512, 4096, 12288},  {2048, 2880, 2880},
                              {4096, 4096, 4096}, {8192, 4096, 14336}, {8192, 8192, 29568}};
    if (what == "sweep") shapes = {{4096, 4096, 4096}};
    for (const Shape& s : shapes)
      for (const OpKind op : kOps) {
        const Shape shape = op == OpKind::all_gather_matmul ? s : Shape{s.m, s.n, s.k};
        time_case({op, shape, false, DType::bfloat16}, group, configs);
      }
  }
  std::puts(failed ? "FAILED" : "done");
  return failed;
}
