// The product that a rank computes in a collective matmul on Hopper.
#pragma once

#include "comm/signal_pad.h"
#include "gemm/problem.h"
#include "kernels/collective_matmul/args.h"
#include "kernels/collective_matmul/plan.h"

namespace jax_ep {

// `lhs` [problem.m, k] times the rank's rhs, to `out` [problem.m, n].
struct RankMatmul {
  const char* lhs;
  char* out;
  gemm::Problem problem;
  int first_communicating;  // CTA
};

inline gemm::Problem problem_of(int m, int n, int k, PairOrder order, const OverlapConfig& config) {
  gemm::Problem problem{gemm::Grouping::none, m, n, k, 1, nullptr, config.band};
  problem.split_k = config.split_k;
  problem.pair_first = order.first;
  problem.pair_lead = order.lead;
  problem.pair_parts = order.parts;
  return problem;
}

// The order of tiles gives all owners rows to sum at any time. The last CTAs wait for peers, because they start last.
inline RankMatmul rank_matmul(const MatmulReduceArgs& args, const Comm& comm, const OverlapConfig& config) {
  const PairOrder order{0, 0, args.reduce_scatter ? comm.size : 1};
  return {args.lhs, args.partial, problem_of(args.m, args.n, args.k, order, config),
          config.ctas() - config.communicating};
}

// The first CTAs send, because they start first.
inline RankMatmul rank_matmul(const AllGatherMatmulArgs& args, const Comm& comm, const OverlapConfig& config) {
  const PairOrder order = own_rows_first(args.m, comm.rank, comm.size);
  return {args.gathered, args.result, problem_of(args.m * comm.size, args.n, args.k, order, config), 0};
}

}  // namespace jax_ep
