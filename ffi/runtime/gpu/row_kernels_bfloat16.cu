// The kernels on rows of bfloat16.
#include "runtime/gpu/define_row_kernels.h"

namespace jax_ep {

template struct RowKernels<BFloat16>;

}  // namespace jax_ep
