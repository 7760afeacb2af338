// Operands and results of the collective matmuls, and the check of all three.
#pragma once

#include <cmath>
#include <random>
#include <vector>

#include "expect.h"
#include "kernels/collective_matmul/args.h"

namespace jax_ep {

struct MatmulShape {
  int m, n, k;
};

// One rank's operands `a` and `b`, which all three ops use, and their results.
struct MatmulRank {
  MatmulShape shape;
  int ranks;
  std::vector<float> a, b, reduced, partial, scattered, gathered, product;

  MatmulRank(MatmulShape s, int ranks)
      : shape(s),
        ranks(ranks),
        a(s.m * s.k),
        b(s.k * s.n),
        reduced(s.m * s.n),
        partial(s.m * s.n),
        scattered(s.m / ranks * s.n),
        gathered(ranks * s.m * s.k),
        product(ranks * s.m * s.n) {}

  MatmulReduceArgs reduce_args(bool reduce_scatter) {
    MatmulReduceArgs args{};
    args.m = shape.m, args.n = shape.n, args.k = shape.k, args.reduce_scatter = reduce_scatter;
    args.lhs = reinterpret_cast<char*>(a.data()), args.rhs = reinterpret_cast<char*>(b.data());
    args.result = reinterpret_cast<char*>(reduce_scatter ? scattered.data() : reduced.data());
    args.partial = reinterpret_cast<char*>(partial.data());
    return args;
  }
  AllGatherMatmulArgs gather_args() {
    AllGatherMatmulArgs args{};
    args.m = shape.m, args.n = shape.n, args.k = shape.k;
    args.lhs = reinterpret_cast<char*>(a.data()), args.rhs = reinterpret_cast<char*>(b.data());
    args.result = reinterpret_cast<char*>(product.data()), args.gathered = reinterpret_cast<char*>(gathered.data());
    return args;
  }
};

inline std::vector<MatmulRank> draw_matmul_ranks(MatmulShape shape, int ranks, std::mt19937& random) {
  std::vector<MatmulRank> drawn(ranks, MatmulRank(shape, ranks));
  for (MatmulRank& rank : drawn) {
    for (float& x : rank.a) x = static_cast<int>(random() % 2001) / 1000.0f - 1;
    for (float& x : rank.b) x = static_cast<int>(random() % 2001) / 1000.0f - 1;
  }
  return drawn;
}

// One value of the `a` of one rank times the `b` of another.
inline double exact_value(const MatmulRank& rows, const MatmulRank& matrix, int row, int column) {
  double sum = 0;
  for (int k = 0; k < rows.shape.k; ++k)
    sum += double{rows.a[row * rows.shape.k + k]} * matrix.b[k * rows.shape.n + column];
  return sum;
}

inline void check_matmuls(const std::vector<MatmulRank>& ranks) {
  const MatmulShape s = ranks[0].shape;
  const auto near = [](float actual, double exact) { return std::fabs(actual - exact) < 1e-4; };
  for (int row = 0; row < s.m; ++row)
    for (int column = 0; column < s.n; ++column) {
      double sum = 0;
      for (const MatmulRank& rank : ranks) sum += exact_value(rank, rank, row, column);
      for (const MatmulRank& rank : ranks)
        expect(near(rank.reduced[row * s.n + column], sum), "matmul_all_reduce sums the products of all ranks");
      const int share = s.m / ranks[0].ranks, owner = row / share, own_row = row % share;
      expect(near(ranks[owner].scattered[own_row * s.n + column], sum), "matmul_reduce_scatter gives each its rows");
      for (int source = 0; source < ranks[0].ranks; ++source)
        for (const MatmulRank& rank : ranks)
          expect(near(rank.product[(source * s.m + row) * s.n + column], exact_value(ranks[source], rank, row, column)),
                 "all_gather_matmul multiplies the rows of all ranks");
    }
}

}  // namespace jax_ep
