// An op as module.cc sees it.
#pragma once

#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/settings.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ep {

using Names = std::vector<std::string>;

// (name, dtype, shape, whether it is the same on all ranks) of a result, for Python. The dtype is null if the result
// begins as an operand, whose dtype it has.
using ResultType = std::tuple<std::string, const char*, std::vector<int64_t>, bool>;

// The name of an op for users, and the results of a call in order.
using CallTypes = std::pair<std::string, std::vector<ResultType>>;

// The names in the spec of an op: (the C++ struct; the op for users, several if a setting decides; settings with their
// label in errors, "" if errors leave it out; operands; results). An updated buffer is an operand and a result.
using OpNames = std::tuple<const char*, Names, std::vector<std::pair<std::string, std::string>>, Names, Names>;

struct BoundOp {
  const char* ffi_target;  // without prefix
  XLA_FFI_Handler* handler;
  // The types of a call with these settings. Throws std::invalid_argument.
  CallTypes (*call_types)(const Settings& settings, int ranks);
  OpNames names;
};

// The ops of the lists in kernels/ops.h. They are bound in several files, as on the CPU these hold the kernels and take
// long to compile.
std::vector<BoundOp> bind_row_ops();
std::vector<BoundOp> bind_matmuls();

XLA_FFI_DECLARE_HANDLER_SYMBOL(mark_handler);

}  // namespace jax_ep
