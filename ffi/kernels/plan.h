// The launch of an op on rows: a pure function of the op's shape and the device.
#pragma once

#include <string>

#include "kernels/hardware_model.h"
#include "kernels/op_spec.h"
#include "rows/movers.h"

namespace jax_ep {

constexpr int kRowThreads = 256;  // of a CTA; more would leave a thread fewer than 255 registers

// Shared memory of a coop; eight coops use all that a CTA may have on sm_90. After the barriers a kernel has
// - Float8RowsDispatchArgs: a row of 7168 values in float8 to write, and three half rows of 16-bit values to read;
// - GroupedCombineArgs, if rows are long: one half row of 16-bit values to write, and three to read;
// - CombineArgs, GroupedCombineArgs and SparseReduceArgs: two batches of 4 KiB to write, and five to read;
// - kernels with a RowMover: a ring of four parts of a row.
constexpr int kWarpBytes = kBarrierBytes + 7424 + 3 * 7168;

struct RowShape {
  LaunchPolicy policy;
  int ranks;
  WorkSize work;
};

// There are few CTAs, because they wait for peers while other kernels need SMs. In each CTA the first warps are
// senders, which push rows to peers. The others are receivers, which zero padding. After that all warps unpack arriving
// rows.
struct LaunchConfig {
  int ctas;  // a CTA takes a whole SM
  int threads;
  int senders_per_cta;
  int warp_bytes;  // of shared memory, for each warp's stages

  std::string describe() const;
};

LaunchConfig plan_rows(const RowShape& shape, const HardwareModel& model);

}  // namespace jax_ep
