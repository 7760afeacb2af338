// The kernels on rows of float16.
#include "runtime/gpu/define_row_kernels.h"

namespace jax_ep {

template struct RowKernels<Float16>;

}  // namespace jax_ep
