// Runs overlap.h and overlap_exchange.h, kernels for Hopper, on the CPU. A thread stands for each warp, and has one
// lane. The product is plain float32 code (protocol/overlap/gemm). ThreadSanitizer looks for races.
//
// Not modelled: 16-bit values, the lanes of a warp, the scopes of fences and atomics, copies in bulk and their fences,
// and a sum over the contraction by two CTAs.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "kernels/collective_matmul/overlap_exchange.h"
#include "kernels/collective_matmul/rank_matmul.h"
#include "matmuls.h"
#include "runtime/group.h"

namespace jax_ep {
namespace {

constexpr int kCtas = 4;

struct Launch {
  int block_n;
  bool split_k;       // the CTAs of a cluster share a tile
  int late_cta = -1;  // its warps start late
};

CUtensorMap matrix(const char* values, int rows, int columns) {
  return {reinterpret_cast<const float*>(values), rows, columns};
}

gemm::Nothing own_rows(const MatmulReduceArgs&) { return {}; }
CUtensorMap own_rows(const AllGatherMatmulArgs& args) { return matrix(args.lhs, args.m, args.k); }

// Shared memory is not zero when a kernel starts.
template <class Memory>
struct Cta {
  std::unique_ptr<Memory> memory = std::make_unique<Memory>();
  CtaBarriers barriers;

  Cta() {
    std::memset(memory.get(), 0xFF, sizeof(Memory));
    std::fill_n(memory->loaded, gemm::kMaxTiles, 0);
  }
};

// One rank's kernel, as runtime/cuda/overlap_launch.h starts it.
template <int kBlockN, class Args>
void run_ctas(const Comm& comm, const Args& args, const Launch& launch, int communicating) {
  const OverlapConfig config{kBlockN, /*band=*/2, launch.split_k, communicating, /*multiplying=*/kCtas, 0};
  const RankMatmul matmul = rank_matmul(args, comm, config);
  const CUtensorMap lhs = matrix(matmul.lhs, matmul.problem.m, args.k), rhs = matrix(args.rhs, args.k, args.n), out{};
  const auto own = own_rows(args);
  const Operands<Args> operands{lhs, rhs, out, own, matmul.out, matmul.problem};
  const OverlapWork<Args> work{comm, args, config.communicating, matmul.first_communicating, kBlockN};
  std::vector<Cta<gemm::Shared<kBlockN, AuxOf<Args>>>> ctas(kCtas);
  std::vector<std::thread> warps;
  for (int cta = 0; cta < kCtas; ++cta)
    for (int warp = 0; warp < kWarpsPerCta; ++warp)
      warps.emplace_back([&, cta, warp] {
        if (cta == launch.late_cta) std::this_thread::sleep_for(std::chrono::milliseconds(50));
        threadIdx.x = warp, blockIdx.x = cta, gridDim.x = kCtas;
        cta_barriers = &ctas[cta].barriers;
        run_overlapped<float, float, kBlockN, true>(reinterpret_cast<char*>(ctas[cta].memory.get()), operands, work);
      });
  for (std::thread& warp : warps) warp.join();
}

template <class Args>
void run(const Comm& comm, const Args& args, const Launch& launch, int communicating = 2) {
  if (launch.block_n == 128)
    run_ctas<128>(comm, args, launch, communicating);
  else
    run_ctas<256>(comm, args, launch, communicating);
}

void run_reduction(const Comm& comm, const MatmulReduceArgs& args, const Launch& launch) {
  if (comm.size == kExchangingRanks)
    run(comm, MatmulExchangeArgs{args}, launch, /*communicating=*/0);
  else
    run(comm, args, launch);
}

// Calls body(comm, rank) on a thread of every rank except `absent`.
template <class Body>
void on_ranks(const Group& group, Body body, int absent = -1) {
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < group.size(); ++rank)
    if (rank != absent) ranks.emplace_back([&, rank] { body(group.comm({0, rank}), rank); });
  for (std::thread& rank : ranks) rank.join();
}

void make_nan(std::vector<float>& values) { std::fill(values.begin(), values.end(), std::nanf("")); }

// A kernel has ended. Its result must be whole, and no peer may read its scratch any more.
void check_whole(const std::vector<float>& result, std::vector<float>& scratch) {
  expect(std::none_of(result.begin(), result.end(), [](float value) { return std::isnan(value); }),
         "a result is whole");
  make_nan(scratch);
}

// The three ops, one after another on each rank, so that a rank may be one op ahead of a peer.
void check_shape(Group& group, MatmulShape shape, const Launch& launch, std::mt19937& random) {
  std::vector<MatmulRank> ranks = draw_matmul_ranks(shape, group.size(), random);
  on_ranks(group, [&](const Comm& comm, int rank) {
    MatmulRank& own = ranks[rank];
    for (std::vector<float>* result : {&own.reduced, &own.scattered, &own.product, &own.partial, &own.gathered})
      make_nan(*result);
    run_reduction(comm, own.reduce_args(/*reduce_scatter=*/false), launch);
    check_whole(own.reduced, own.partial);
    run_reduction(comm, own.reduce_args(/*reduce_scatter=*/true), launch);
    check_whole(own.scattered, own.partial);
    run(comm, own.gather_args(), {launch.block_n, /*split_k=*/false, launch.late_cta});
    check_whole(own.product, own.gathered);
  });
  check_matmuls(ranks);
}

void matmuls(const std::vector<int>& devices, const Launch& launch) {
  for (const bool poison : {false, true}) {
    Group group({devices}, 60.0, poison);
    std::mt19937 random(3);
    for (const MatmulShape shape : std::vector<MatmulShape>{{100, 20, 24}, {4, 8, 3}, {64, 300, 8}, {200, 132, 4}})
      check_shape(group, shape, launch, random);
    expect(!group.take_error(), "no error is reported");
  }
}

// A CTA has more tiles than flags.
TEST_CASE("overlapped matmuls: two ranks, several tiles to a flag") {
  Group group({{0, 1}}, 60.0, /*poison=*/false);
  std::mt19937 random(3);
  const MatmulShape shape{(kMaxFlags / kCtas + 8) * kCtas / 4 * gemm::kBlockM, 512, 1};
  check_shape(group, shape, {128, /*split_k=*/false}, random);
  expect(!group.take_error(), "no error is reported");
}

void lost_rank(const std::vector<int>& devices, int block_n) {
  enum { kReduce, kScatter, kGather, kOps };
  for (int op = 0; op < kOps; ++op) {
    Group group({devices}, 0.5, /*poison=*/false);
    std::vector<MatmulRank> ranks(devices.size(), MatmulRank({64, 16, 8}, group.size()));
    const auto since = std::chrono::steady_clock::now();
    on_ranks(
        group,
        [&](const Comm& comm, int rank) {
          if (op == kGather)
            run(comm, ranks[rank].gather_args(), {block_n, false});
          else
            run_reduction(comm, ranks[rank].reduce_args(op == kScatter), {block_n, false});
        },
        /*absent=*/group.size() - 1);
    expect(std::chrono::steady_clock::now() - since < std::chrono::seconds(20), "an op without a peer ends in time");
    const auto error = group.take_error();
    expect(error && error->kind == ErrorKind::peer_timeout, "a lost rank is a PeerTimeoutError");
    for (int rank = 0; rank < group.size() - 1; ++rank) {
      const MatmulRank& own = ranks[rank];
      const std::vector<float>& result = op == kGather ? own.product : op == kScatter ? own.scattered : own.reduced;
      expect(std::all_of(result.begin(), result.end(), [](float value) { return std::isnan(value); }),
             "results are NaN after a failure");
    }
  }
}

constexpr Launch kInTurns{128, false}, kWide{256, false}, kShared{128, true};

TEST_CASE("overlapped matmuls: two ranks, warpgroups in turns") { matmuls({0, 1}, kInTurns); }
TEST_CASE("overlapped matmuls: two ranks, wide tiles") { matmuls({0, 1}, kWide); }
TEST_CASE("overlapped matmuls: two ranks, CTAs share tiles") { matmuls({0, 1}, kShared); }
TEST_CASE("overlapped matmuls: four ranks, warpgroups in turns") { matmuls({0, 1, 2, 3}, kInTurns); }
TEST_CASE("overlapped matmuls: four ranks, wide tiles") { matmuls({0, 1, 2, 3}, kWide); }
TEST_CASE("overlapped matmuls: four ranks, CTAs share tiles") { matmuls({0, 1, 2, 3}, kShared); }
TEST_CASE("overlapped matmuls: a late CTA, whose peers have left") { matmuls({0, 1, 2, 3}, {128, false, kCtas - 1}); }
TEST_CASE("lost rank: overlapped matmuls end in time") {
  for (const auto& devices : {std::vector{0, 1}, std::vector{0, 1, 2, 3}})
    for (const int block_n : {128, 256}) lost_rank(devices, block_n);
}

}  // namespace
}  // namespace jax_ep
