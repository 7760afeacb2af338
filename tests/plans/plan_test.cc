// Plans of every op, on devices of many sizes: they ask for no more than there is, and know themselves in words.
#include "gemm/plan.h"

#include <string>

#include "../protocol/expect.h"
#include "comm/platform.h"
#include "kernels/plan.h"
#include "kernels/signature.h"

namespace jax_ep {
namespace {

HardwareModel hopper() { return hardware_model(132, 232448, 32); }

void check_row_plan(const RowShape& shape, const HardwareModel& model) {
  const LaunchConfig config = plan_rows(shape, model);
  const std::string words = config.describe();
  INFO(model.sms, " SMs: ", words);
  const int coops = config.threads / model.warp_lanes;
  int pushing = 0;
  for (int coop = 0; coop < coops; ++coop)
    pushing += !sender_part(0, config.ctas, coop, config.senders_per_cta).empty();
  const int counted = sender_part(0, config.ctas, 0, config.senders_per_cta).count;
  expect(config.ctas >= 1 && config.ctas <= model.row_sms, "CTAs are within the SMs");
  expect(counted == pushing * config.ctas, "every sender that is counted exists");
  expect(config.senders_per_cta >= 1, "there are senders");
  expect(config.warp_bytes * coops <= model.shared_bytes, "the coops share what there is");
  const bool uses_all = config.warp_bytes * (coops + 1) > model.shared_bytes;
  expect(uses_all || config.warp_bytes >= 7 * 4096, "where there is little, they share all of it");
  expect(words.find(std::to_string(config.ctas) + " CTAs") == 0, "words say the CTAs");
}

void check_row_plans(const HardwareModel& model) {
#define JAX_EP_POLICY(Args) OpSpec<Args>::kLaunch,
  for (const LaunchPolicy policy : {JAX_EP_ROW_OPS(JAX_EP_POLICY)})
    for (const int tokens : {0, 1, 128, 512, 513, 4096})
      for (const bool in_float8 : {false, true})
        for (const int ranks : {1, 2, 4, 8})
          for (const int top_k : {0, 2, 8})
            for (const int64_t row_bytes : {4096, 14336})
              check_row_plan({policy, ranks, {tokens, in_float8, top_k, row_bytes}}, model);
}

void check_overlap_plan(const CollectiveMatmulShape& shape, const HardwareModel& model) {
  const OverlapConfig config = plan_overlap(shape, model);
  const std::string words = config.describe();
  INFO(model.sms, " SMs: ", words);
  const bool fits = config.ctas() <= model.sms && config.communicating % 2 == 0 && config.multiplying % 2 == 0;
  expect(fits && config.multiplying >= 2, "whole clusters within the SMs");
  expect(config.band >= 1 && config.microseconds > 0, "bands and a time");
  expect(words.find("tiles 128x" + std::to_string(config.block_n)) == 0, "words say the tiles");
}

void check_overlap_plans(const HardwareModel& model) {
  constexpr OpKind kProducts[] = {OpKind::matmul_all_reduce, OpKind::matmul_reduce_scatter, OpKind::all_gather_matmul};
  for (const int m : {128, 4096, 5416})
    for (const int n : {64, 1408, 8192})
      for (const int k : {64, 6144}) {
        for (const OpKind op : kProducts)
          for (const int ranks : {2, 4, 8}) check_overlap_plan({op, m, n, k, 2, ranks}, model);
        using gemm::Grouping;
        for (const Grouping grouping : {Grouping::none, Grouping::m_grouped, Grouping::k_grouped}) {
          const gemm::Config config = gemm::plan_tiles({grouping, m, n, k, 8}, model.sms);
          INFO(model.sms, " SMs: ", config.describe());
          expect(config.ctas >= 2 && config.ctas <= model.sms, "within the SMs");
          expect(config.ctas % gemm::kCluster == 0, "whole clusters");
        }
      }
}

// Two ranks that exchange their tiles agree on more than the call: a device of other SMs, or another max_sms, is told
// apart, and named.
TEST_CASE("ranks that exchange tiles agree on their plan") {
  const HardwareModel whole = hopper(), part = limit_sms(whole, 64);
  MatmulReduceArgs args{};
  args.dtype = args.operand_dtype = DType::bfloat16;
  args.m = args.n = args.k = 2048;
  const Signature called = signature_of(args);
  const auto signed_on = [&](const HardwareModel& model, int ranks) {
    return with_plan(called, plan_overlap(shape_of(args, ranks), model));
  };
  const Signature here = signed_on(whole, 2), there = signed_on(part, 2);
  INFO(describe(here), "; ", describe(there));
  expect(tag_of(here) == tag_of(signed_on(whole, 2)), "equal devices agree");
  expect(tag_of(here) != tag_of(there), "devices of other SMs do not");
  expect(describe(here).find(", 130 CTAs, tiles 128x") != std::string::npos, "plans are named");
  expect(describe(there).find(", 62 CTAs, tiles 128x") != std::string::npos, "plans are named");
  OverlapConfig other = plan_overlap(shape_of(args, 2), whole);
  other.split_k = !other.split_k;
  expect(tag_of(with_plan(called, other)) != tag_of(here), "so are shares of tiles");
  expect(tag_of(signed_on(part, 4)) == tag_of(called), "more ranks take tiles in any order");
  expect(describe(called).find("CTAs") == std::string::npos, "they have no plan to name");
}

TEST_CASE("a device says what it has") {
  const HardwareModel half = hardware_model(66, 1 << 16, 32);
  expect(half.row_sms == 48 && half.shared_bytes == 1 << 16, "a device says what it has");
  const HardwareModel few = limit_sms(hopper(), 100);
  expect(few.sms == 100 && few.row_sms == 100, "what the user allows is used");
  expect(limit_sms(few, 200).sms == 100, "a limit adds nothing");
}

// Runs a check on H100, A100 and MI300, and on devices of odd sizes.
template <class Check>
void on_all_devices(Check check) {
  for (const HardwareModel& device : {hopper(), hardware_model(108, 166912, 32), hardware_model(304, 65536, 64)})
    check(device);
  for (const int lanes : {32, 64})
    for (const int sms : {4, 8, 31, 32, 64, 96, 222}) check(hardware_model(sms, 1 << 16, lanes));
}

TEST_CASE("ops on rows ask for no more than there is") {
  on_all_devices(check_row_plans);
  on_all_devices([](const HardwareModel& device) { check_row_plans(limit_sms(device, 1)); });
}
TEST_CASE("ops on rows ask for no more shared memory than CTAs have") {
  // On old GPUs, on RTX cards (8.6, 8.9, 12.0), A100 and Hopper or newer.
  for (const int lanes : {32, 64})
    for (const int shared_bytes : {48 << 10, 99 << 10, 163 << 10, 227 << 10})
      check_row_plans(hardware_model(96, shared_bytes, lanes));
}
TEST_CASE("collective matmuls ask for whole clusters within the SMs") { on_all_devices(check_overlap_plans); }

}  // namespace
}  // namespace jax_ep
