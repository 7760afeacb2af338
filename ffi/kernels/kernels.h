// The kernels of all ops, and which of them runs an op.
#pragma once

#include <type_traits>

#include "kernels/matmul/gather.h"
#include "kernels/matmul/reduce.h"
#include "kernels/moe/combine.h"
#include "kernels/moe/dispatch.h"
#include "kernels/moe/scatter.h"
#include "kernels/ragged/ragged_all_to_all.h"
#include "kernels/sparse/reduce.h"
#include "kernels/sparse/union.h"

namespace jax_ep {

// Calls run(args) with the arguments of the kernel for an op's arguments. Ops that have several kernels overload it.
template <class Args, class Run>
auto choose_kernel(const Args& args, Run run) {
  return run(args);
}

// Whether a kernel looks at no values.
template <class Args>
inline constexpr bool kIsBlind = false;
#define JAX_EP_IS_BLIND(Args) \
  template <>                 \
  inline constexpr bool kIsBlind<Args> = true;
JAX_EP_BLIND_KERNELS(JAX_EP_IS_BLIND)
#undef JAX_EP_IS_BLIND

// In place of the format of values, for kernels that are blind.
struct NoFormat {};

// Calls run(format, args) with the format and the arguments of the kernel for an op's arguments.
template <class Args, class Run>
auto with_kernel(const Args& args, Run run) {
  return choose_kernel(args, [&](const auto& chosen) {
    if constexpr (kIsBlind<std::decay_t<decltype(chosen)>>)
      return run(NoFormat{}, chosen);
    else
      return with_format(chosen.dtype, [&](auto format) { return run(format, chosen); });
  });
}

// A kernel, for one format of values if it looks at them.
template <class Format, class Args>
JAX_EP_FN void run_kernel_on(const Comm& comm, const Args& args, const Coop& coop) {
  if constexpr (kIsBlind<Args>)
    run_kernel(comm, args, coop);
  else
    run_kernel<Format>(comm, args, coop);
}

}  // namespace jax_ep
