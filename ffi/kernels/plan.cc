#include "kernels/plan.h"

#include <algorithm>

#include "kernels/moe/layout.h"
#include "kernels/sparse/args.h"
#include "rows/movers.h"

namespace jax_ep {
namespace {

constexpr int kThreads = 256;  // a choice: more would leave a thread fewer than 255 registers
// Shared memory of a coop. Behind the barriers it holds a row of 7168 values in float8 to write and three half rows of
// 16-bit values to read; or four such half rows, or seven batches of 4 KiB, or a ring of three parts of a row. Eight
// coops use all that a CTA may have on sm_90.
constexpr int kWarpBytes = kBarrierBytes + 7424 + 3 * 7168;
static_assert(RowRates{}.union_blocks * kMaxCtaCoops <= kMaxCoops, "the scratch of sparse_union has room for no more");

int find_senders(const SenderRule (&rules)[kSenderRules], int ranks, int blocks) {
  const auto* const rule =
      std::find_if(rules, std::end(rules), [&](const SenderRule& each) { return blocks <= each.most_blocks; });
  return ranks > 2 ? rule->more_ranks : rule->two_ranks;  // two ranks send each other less
}

// How many coops of a CTA are senders.
int senders(const RowShape& shape, const RowRates& rates, int blocks, int coops) {
  const bool few = shape.num_tokens <= kFewTokens;
  switch (shape.op) {
    case OpKind::dispatch:
    case OpKind::scatter:
      if (shape.encoded && few) return rates.few_senders;
      return find_senders(shape.encoded ? rates.dispatch_float8 : rates.dispatch, shape.ranks, blocks);
    case OpKind::combine:
      return few ? rates.few_senders : find_senders(rates.combine, shape.ranks, blocks);
    default:
      return coops;
  }
}

// The blocks that an op has work for, if that is known. Even few tokens may have many rows where they arrive.
int useful_blocks(const RowShape& shape, const RowRates& rates, int all) {
  switch (shape.op) {
    case OpKind::dispatch:
    case OpKind::combine:
    case OpKind::ragged_all_to_all:
      return all;
    case OpKind::sparse_union:
      return std::min(shape.num_tokens / rates.union_entries_per_block + 1, rates.union_blocks);
    default:
      return shape.num_tokens;
  }
}

// The blocks that an op may have.
int most_blocks(const RowShape& shape, const HardwareModel& model) {
  const bool is_sparse = shape.op == OpKind::sparse_union || shape.op == OpKind::sparse_reduce;
  return std::max(1, is_sparse ? std::min(model.row_sms, model.sparse_sms) : model.row_sms);
}

}  // namespace

LaunchConfig plan(const RowShape& shape, const HardwareModel& model) {
  const int most = most_blocks(shape, model), coops = kThreads / model.warp_lanes;
  const int blocks = std::clamp(useful_blocks(shape, model.rows, most), 1, most);
  const int warp_bytes = std::min(kWarpBytes, model.shared_bytes / coops / 128 * 128);
  return {blocks, kThreads, std::min(senders(shape, model.rows, blocks, coops), coops), warp_bytes};
}

std::string LaunchConfig::describe() const {
  return std::to_string(blocks) + " blocks of " + std::to_string(threads) + " threads, " +
         std::to_string(senders_per_cta) + " sender warps in each, " + std::to_string(warp_bytes) + " bytes a warp";
}

}  // namespace jax_ep
