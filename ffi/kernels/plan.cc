#include "kernels/plan.h"

#include <algorithm>

#include "kernels/moe/layout.h"
#include "kernels/sparse/args.h"

namespace jax_ep {
namespace {

static_assert(kH200Rates.rows.union_ctas * kMaxCtaCoops <= kMaxCoops,
              "the scratch of sparse_union has room for no more");

constexpr bool covers_any(const SenderRule (&rules)[kSenderRules]) {
  for (const SenderRule& rule : rules)
    if (rule.most_ctas == kAnyCtas) return true;
  return false;
}
static_assert(covers_any(kH200Rates.rows.dispatch) && covers_any(kH200Rates.rows.dispatch_few) &&
              covers_any(kH200Rates.rows.dispatch_float8) && covers_any(kH200Rates.rows.combine));

int find_senders(const SenderRule (&rules)[kSenderRules], int row_case, int ctas) {
  const auto* const rule =
      std::find_if(rules, std::end(rules), [&](const SenderRule& each) { return ctas <= each.most_ctas; });
  return rule->senders[row_case];
}

// The cases of RowRates' tables.
int case_of_dispatch(int ranks, const WorkSize& work) {
  if (ranks <= 2) return 0;
  return work.row_bytes > kShortRowBytes ? 1 : 2;
}
int case_of_float8(int ranks, const WorkSize& work) {
  if (work.top_k < 4) return work.row_bytes > kShortRowBytes ? 3 : 2;
  return ranks <= 2 ? 0 : 1;
}
int case_of_combine(int ranks, const WorkSize& work) {
  if (work.top_k >= 3 * ranks) return 0;
  return 2 * work.top_k >= 3 * ranks ? 1 : 2;
}

int senders(const RowShape& shape, const RowRates& rates, int ctas, int coops) {
  const auto& [policy, ranks, work] = shape;
  const bool few_tokens = work.items <= kFewTokens, combines = policy.senders == Senders::by_combine_rates;
  if (policy.senders == Senders::all) return coops;
  if (few_tokens && (combines || work.in_float8)) return rates.few_senders;
  if (combines) return find_senders(rates.combine, case_of_combine(ranks, work), ctas);
  if (work.in_float8) return find_senders(rates.dispatch_float8, case_of_float8(ranks, work), ctas);
  const auto& rules = work.items <= kEagerTokens ? rates.dispatch_few : rates.dispatch;
  return find_senders(rules, case_of_dispatch(ranks, work), ctas);
}

int wanted_ctas(const RowShape& shape, const RowRates& rates, int all) {
  if (shape.policy.ctas == Ctas::one_an_item) return shape.work.items;
  if (shape.policy.ctas == Ctas::all) return all;
  return std::min(shape.work.items / rates.union_entries_per_cta + 1, rates.union_ctas);
}

}  // namespace

LaunchConfig plan_rows(const RowShape& shape, const HardwareModel& model) {
  const int most = std::max(1, model.row_sms);
  const int ctas = std::clamp(wanted_ctas(shape, model.rates.rows, most), 1, most);
  const int coops = kRowThreads / model.warp_lanes;
  const int warp_bytes = std::min(kWarpBytes, model.shared_bytes / coops / 128 * 128);
  return {ctas, kRowThreads, std::min(senders(shape, model.rates.rows, ctas, coops), coops), warp_bytes};
}

std::string LaunchConfig::describe() const {
  return concat(ctas, " CTAs of ", threads, " threads, ", senders_per_cta, " sender warps in each, ", warp_bytes,
                " bytes a warp");
}

}  // namespace jax_ep
