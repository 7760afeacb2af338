// The kernels of a product and its collective, as Hopper runs them, on the CPU: kernels/collective_matmul/overlap.h and
// overlap_exchange.h over the GEMM core of protocol/overlap/gemm. Each warp is a thread. Built with ThreadSanitizer.
#include <algorithm>
#include <cmath>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "kernels/collective_matmul/overlap_exchange.h"
#include "kernels/collective_matmul/plan.h"
#include "matmuls.h"
#include "runtime/group.h"

namespace jax_ep {
namespace {

constexpr int kCtas = 4, kCommunicating = 2;

// The product that a rank computes, as runtime/cuda/overlap_launch.h describes it.
struct RankMatmul {
  CUtensorMap lhs, own;
  char* out;
  gemm::Problem problem;
  int first_communicating;
};

CUtensorMap matrix(const char* values, int rows, int columns) {
  return {reinterpret_cast<const float*>(values), rows, columns};
}

gemm::Problem problem_of(int m, int n, int k, PairOrder order, bool split_k) {
  gemm::Problem problem{gemm::Grouping::none, m, n, k, 1, nullptr, /*band=*/2};
  problem.pair_first = order.first, problem.pair_lead = order.lead, problem.pair_parts = order.parts;
  problem.split_k = split_k;
  return problem;
}

RankMatmul rank_matmul(const MatmulReduceArgs& args, const Comm& comm, bool split_k) {
  const PairOrder order{0, 0, args.reduce_scatter ? comm.size : 1};
  return {matrix(args.lhs, args.m, args.k),
          {},
          args.partial,
          problem_of(args.m, args.n, args.k, order, split_k),
          kCtas - kCommunicating};
}

RankMatmul rank_matmul(const AllGatherMatmulArgs& args, const Comm& comm, bool split_k) {
  constexpr int kFewerRows = 128 / gemm::kBlockM;  // than in a tile on Hopper
  const int rows = args.m * comm.size;
  const PairOrder order = own_rows_first(args.m * kFewerRows, comm.rank, comm.size);
  return {matrix(args.gathered, rows, args.k), matrix(args.lhs, args.m, args.k), args.result,
          problem_of(rows, args.n, args.k, order, split_k), 0};
}

gemm::Nothing own_map(const RankMatmul&, const MatmulReduceArgs&) { return {}; }
CUtensorMap own_map(const RankMatmul& matmul, const AllGatherMatmulArgs&) { return matmul.own; }

// One rank's launch: a thread for each warp.
template <int kBlockN, class Args>
void launch(const Comm& comm, const Args& args, bool split_k) {
  using Memory = gemm::Shared<kBlockN, AuxOf<Args>>;
  const RankMatmul matmul = rank_matmul(args, comm, split_k);
  const CUtensorMap rhs = matrix(args.rhs, args.k, args.n), out_map{};
  const auto own = own_map(matmul, args);
  const Operands<Args> operands{matmul.lhs, rhs, out_map, own, matmul.out, matmul.problem};
  const OverlapWork<Args> work{comm, args, kCommunicating, matmul.first_communicating, kBlockN};
  struct Cta {
    std::unique_ptr<Memory> memory = std::make_unique<Memory>();
    CtaBarriers barriers;
  } ctas[kCtas];
  std::vector<std::thread> warps;
  for (int cta = 0; cta < kCtas; ++cta)
    for (int warp = 0; warp < kWarpsPerCta; ++warp)
      warps.emplace_back([&, cta, warp] {
        threadIdx.x = warp, blockIdx.x = cta, gridDim.x = kCtas;
        cta_barriers = &ctas[cta].barriers;
        run_overlapped<float, float, kBlockN, true>(reinterpret_cast<char*>(ctas[cta].memory.get()), operands, work);
      });
  for (std::thread& warp : warps) warp.join();
}

template <int kBlockN>
void launch_reduction(const Comm& comm, const MatmulReduceArgs& args, bool split_k) {
  if (comm.size == kExchangingRanks)
    launch<kBlockN>(comm, MatmulExchangeArgs{args}, split_k);
  else
    launch<kBlockN>(comm, args, split_k);
}

// Calls body(comm, rank) on a thread of every rank but one.
template <class Body>
void on_ranks(const Group& group, Body body, int absent = -1) {
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < group.size(); ++rank)
    if (rank != absent) ranks.emplace_back([&, rank] { body(group.comm({0, rank}), rank); });
  for (std::thread& rank : ranks) rank.join();
}

// A rank goes on as soon as its kernel has ended: by then peers have written its result, and read its scratch.
void go_on(const std::vector<float>& result, std::vector<float>& scratch) {
  expect(std::none_of(result.begin(), result.end(), [](float value) { return std::isnan(value); }),
         "a result is whole");
  std::fill(scratch.begin(), scratch.end(), std::nanf(""));
}

template <int kBlockN>
void matmuls(const std::vector<int>& devices, bool split_k, int times) {
  Group group({devices}, 60.0, /*poison=*/true);
  std::mt19937 random(3);
  for (int i = 0; i < times; ++i) {
    const MatmulShape shapes[] = {{100, 20, 24}, {4, 8, 3}, {64, 300, 8}, {200, 132, 4}};
    std::vector<MatmulRank> ranks = draw_matmul_ranks(shapes[i % 4], group.size(), random);
    for (const bool scatter : {false, true})
      on_ranks(group, [&](const Comm& comm, int rank) {
        MatmulRank& own = ranks[rank];
        launch_reduction<kBlockN>(comm, own.reduce_args(scatter), split_k);
        go_on(scatter ? own.scattered : own.reduced, own.partial);
      });
    on_ranks(group, [&](const Comm& comm, int rank) {
      launch<kBlockN>(comm, ranks[rank].gather_args(), /*split_k=*/false);
      go_on(ranks[rank].product, ranks[rank].gathered);
    });
    check_matmuls(ranks);
  }
  expect(!group.take_error(), "no error is reported");
}

void lost_rank(const std::vector<int>& devices, bool gather) {
  Group group({devices}, 0.5, /*poison=*/false);
  std::vector<MatmulRank> ranks(devices.size(), MatmulRank({64, 16, 8}, group.size()));
  on_ranks(
      group,
      [&](const Comm& comm, int rank) {
        if (gather)
          launch<128>(comm, ranks[rank].gather_args(), /*split_k=*/false);
        else
          launch_reduction<128>(comm, ranks[rank].reduce_args(/*reduce_scatter=*/false), /*split_k=*/false);
      },
      /*absent=*/group.size() - 1);
  const auto error = group.take_error();
  expect(error && error->kind == ErrorKind::peer_timeout, "a lost rank is a PeerTimeoutError");
  expect(std::isnan(gather ? ranks[0].product[0] : ranks[0].reduced[0]), "results are NaN after a failure");
}

TEST_CASE("overlapped matmuls: of two ranks, warpgroups in turns") { matmuls<128>({0, 1}, /*split_k=*/false, 8); }
TEST_CASE("overlapped matmuls: of two ranks, wide tiles") { matmuls<256>({0, 1}, /*split_k=*/false, 8); }
TEST_CASE("overlapped matmuls: of two ranks, the contraction split") { matmuls<128>({0, 1}, /*split_k=*/true, 8); }
TEST_CASE("overlapped matmuls: of four ranks, warpgroups in turns") { matmuls<128>({0, 1, 2, 3}, false, 4); }
TEST_CASE("overlapped matmuls: of four ranks, wide tiles") { matmuls<256>({0, 1, 2, 3}, false, 4); }
TEST_CASE("overlapped matmuls: of four ranks, the contraction split") { matmuls<128>({0, 1, 2, 3}, true, 4); }
TEST_CASE("lost rank: overlapped matmuls end in time") {
  for (const bool gather : {false, true})
    for (const auto& devices : {std::vector{0, 1}, std::vector{0, 1, 2, 3}}) lost_rank(devices, gather);
}

}  // namespace
}  // namespace jax_ep
