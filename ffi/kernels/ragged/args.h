// What ragged_all_to_all is called with: plain pointers into XLA's buffers of this rank, and the sizes.
#pragma once

#include <cstdint>

#include "comm/heap.h"

namespace jax_ep {

struct RaggedArgs {
  int slices;  // per peer
  int64_t operand_rows, result_rows, row_bytes;
  const char* operand;
  const int32_t *input_offsets, *send_sizes, *output_offsets, *recv_sizes;  // [R, slices]
  char* result;
};

constexpr OpKind kind_of(const RaggedArgs&) { return OpKind::ragged_all_to_all; }

}  // namespace jax_ep
