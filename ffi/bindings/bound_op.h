// An op as module.cc sees it.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "bindings/settings.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ep {

// The type of a result, for Python. The dtype is null if the result begins as an operand, whose dtype it has.
struct ResultType {
  std::string name;
  const char* dtype;
  std::vector<int64_t> shape;
  bool replicated;  // the same on all ranks
};

// The name of an op for users, and the results of a call in order.
struct CallTypes {
  std::string op;
  std::vector<ResultType> results;
};

// The names in the spec of an op.
struct OpNames {
  const char* arguments;                                      // the C++ struct
  std::vector<std::string> ops;                               // for users; several if a setting decides
  std::vector<std::pair<std::string, std::string>> settings;  // with the label in errors, "" if errors leave it out
  std::vector<std::string> operands, results;                 // an updated buffer is both
};

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
