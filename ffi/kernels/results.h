// The results of an op from its spec, for Op::poison and Op::finish: what a failure fills.
#pragma once

#include <type_traits>

#include "comm/result.h"
#include "kernels/op_spec.h"

namespace jax_ep {

// Nothing is worked out before it is needed: results are rarely filled, and a kernel has no registers to spare.
template <class Args>
class Results {
 public:
  JAX_EP_FN Results(const Args& args, int ranks) : args_(args), ranks_(ranks) {}

  // Calls visit(buffer) for each. Absent ones have no bytes.
  template <class Visit>
  JAX_EP_FN void each(const Visit& visit) const {
    OpSpec<Args>::buffers(args_, ranks_, VisitResults<Visit>{args_, visit});
  }

 private:
  template <class Visit>
  struct VisitResults {
    const Args& args;
    const Visit& visit;
    template <class T>
    JAX_EP_FN void operator()(const BufferSpec& spec, T* Args::* member) const {
      if constexpr (!std::is_const_v<T>)
        if (spec.is_result()) visit(Buffer{args.*member, spec.bytes(), spec.undelivered});
    }
  };

  const Args& args_;
  const int ranks_;
};

}  // namespace jax_ep
