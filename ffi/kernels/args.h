// What all ops are called with.
#pragma once

#include "kernels/matmul/args.h"
#include "kernels/moe/args.h"
#include "kernels/moe/dot_args.h"
#include "kernels/ragged/args.h"
#include "kernels/sparse/args.h"

namespace jax_ep {

// Whether a kernel looks at no values.
template <class Args>
inline constexpr bool kIsBlind = false;
#define JAX_EP_IS_BLIND(Args) \
  template <>                 \
  inline constexpr bool kIsBlind<Args> = true;
JAX_EP_BLIND_KERNELS(JAX_EP_IS_BLIND)
#undef JAX_EP_IS_BLIND

}  // namespace jax_ep
