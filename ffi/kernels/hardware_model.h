// A GPU as plans see it: its SMs, its shared memory, and the rates of ops.
//
// All rates, here and in gemm::kH200ProductRates, were fitted on an H200, and plans use them for every GPU. On another
// GPU a plan is valid, but may not be the fastest. The comment of a rate names the command that measures it.
// kernels_bench, gemm_bench and overlap_bench are built from benchmarks/kernels.
#pragma once

namespace jax_ep {

// A rule gives the sender warps of a CTA, for ops of at most `most_ctas` CTAs. The comment of a table lists its cases.
struct SenderRule {
  int most_ctas;
  int senders[4];  // by case
};
constexpr int kSenderRules = 4, kAnyCtas = 1 << 30;

// Rates of ops on rows: kernels/plan.cc.
struct RowRates {
  int sm_percent = 73;  // 96 of 132 SMs, which leaves some to XLA's own collectives: kernels_bench 2, kernels_bench 4
  // kernels_bench 2, kernels_bench 4. Cases: two ranks; more ranks and rows above kShortRowBytes; more ranks and
  // others.
  SenderRule dispatch[kSenderRules] = {{16, {6, 3, 2}}, {32, {5, 3, 2}}, {48, {4, 3, 2}}, {kAnyCtas, {2, 2, 2}}};
  SenderRule dispatch_few[kSenderRules] = {{31, {5, 3, 3}}, {64, {3, 2, 2}}, {kAnyCtas, {2, 2, 2}}};  // kEagerTokens
  // The same. Cases: two ranks; more ranks; fewer than four rows a token, which leave little to receivers, and rows up
  // to kShortRowBytes; the same and longer rows.
  SenderRule dispatch_float8[kSenderRules] = {{32, {6, 5, 6, 7}}, {64, {5, 2, 6, 5}}, {kAnyCtas, {3, 2, 5, 4}}};
  // The same. Cases by top_k / ranks, the mean rows of a token on a rank: at least 3; at least 1.5; less.
  SenderRule combine[kSenderRules] = {{16, {8, 6, 4}}, {24, {7, 5, 4}}, {48, {5, 5, 3}}, {kAnyCtas, {4, 4, 3}}};
  int few_senders = 4;              // for combine and float8 dispatch of few tokens
  int union_entries_per_cta = 256;  // of sparse_union: bench sparse
  int union_ctas = 96;              // at most: bench sparse
};

// Rates of all_gather_matmul: kernels/collective_matmul/plan.cc. Fitted together to overlap_bench sweep 2 and sweep 4.
struct GatherRates {
  double flops_per_us = 5.9e6;   // of an SM with tiles of 256 columns
  double narrow = 0.93;          // of that rate with 128 columns
  double tile_us = 1;            // to begin and to store a tile
  double handshake_us = 10;      // until the first rows can arrive
  double bytes_per_cta = 2.3e3;  // to each peer, in a microsecond
  double once_us = 7;            // to start and to end the kernel
  int most_leaving = 108;        // CTAs times peers: overlap_bench ctas 2, overlap_bench ctas 4
  int most_pairs = 8;            // of a band: overlap_bench bands 2, overlap_bench bands 4
};

// Rates of reductions in which some CTAs fetch and sum. Fitted together to overlap_bench sweep 2 and sweep 4.
struct ReduceRates {
  double flops_per_us = 6.2e6;  // of an SM with tiles of 256 columns
  double narrow = 0.94;         // of that rate with 128 columns
  double tile_us = 2.5;         // to begin and to store a tile
  double round_us = 15;         // from the last tile to the last flag, and to begin
  double bytes_per_us = 300e3;  // of each direction
  double last_per_us = 230e3;   // bytes for which all ranks wait
  int most_pushing = 144;       // CTAs times peers: overlap_bench ctas 2, overlap_bench ctas 4
  int most_pairs = 16;          // of a band: overlap_bench bands 2, overlap_bench bands 4
  int least_bands = 8;          // so that the last band moves few bytes: overlap_bench bands 2
};

// Rates of reductions in which two ranks exchange tiles. Fitted together to overlap_bench time 2 and sweep 2.
struct ExchangeRates {
  int spare_sms = 2;                    // for other kernels while all CTAs wait for a peer; not measured
  double most_reduced = 28e6;           // bytes: pushing more delays the product by more than the time of a fetch
  double most_reduce_scattered = 17e6;  // of matmul_reduce_scatter
  double once_us = 5;                   // to begin, and from the last tile to the last sum
  double ping_pong_us = 1.5;            // to begin a tile of 128 columns while another is stored
  double pushed_per_us = 380e3;         // bytes
  double exposed = 0.75, narrow_exposed = 0.5;  // of the time to push tiles of 256 and of 128 columns
};

struct Rates {
  RowRates rows;
  GatherRates gather;
  ReduceRates reduce;
  ExchangeRates exchange;
};
constexpr Rates kH200Rates{};

struct HardwareModel {
  int sms;           // that an op may take
  int row_sms;       // that an op on rows may take
  int shared_bytes;  // that a CTA may have
  int warp_lanes;    // threads of a warp
  Rates rates = kH200Rates;
};

HardwareModel hardware_model(int sms, int shared_bytes, int warp_lanes);

// The model with at most `most` SMs. Ops on rows may take all of them.
HardwareModel limit_sms(HardwareModel model, int most);

}  // namespace jax_ep
