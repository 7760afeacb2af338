// The kernels of all ops, and the kernel of a call.
#pragma once

#include <type_traits>
#include <variant>

#include "kernels/collective_matmul/all_gather.h"
#include "kernels/collective_matmul/reduce.h"
#include "kernels/moe/combine.h"
#include "kernels/moe/dispatch.h"
#include "kernels/moe/scatter.h"
#include "kernels/ragged/ragged_all_to_all.h"
#include "kernels/sparse/reduce.h"
#include "kernels/sparse/union.h"

namespace jax_ep {

// The arguments of the kernel that runs a call on so many ranks and CTAs. An op with several kernels overloads this.
template <class Args>
std::variant<Args> kernel_of(const Args& args, int, int) {
  return args;
}

template <class Args>
inline constexpr bool kIsByteWise = false;
#define JAX_EP_IS_BYTE_WISE(Args) \
  template <>                     \
  inline constexpr bool kIsByteWise<Args> = true;
JAX_EP_BYTE_KERNELS(JAX_EP_IS_BYTE_WISE)
#undef JAX_EP_IS_BYTE_WISE

// Calls run(format, args), where run_kernel<decltype(format)>(comm, args, coop) is the kernel of the call.
template <class Args, class Run>
auto with_kernel(const Args& args, int ranks, int ctas, Run run) {
  return std::visit(
      [&](const auto& kernel_args) {
        if constexpr (kIsByteWise<std::decay_t<decltype(kernel_args)>>)
          return run(NoFormat{}, kernel_args);
        else
          return with_format(kernel_args.dtype, [&](auto format) { return run(format, kernel_args); });
      },
      kernel_of(args, ranks, ctas));
}

}  // namespace jax_ep
