// The kernels on rows of float32.
#include "runtime/gpu/define_row_kernels.h"

namespace jax_ep {

template struct RowKernels<float>;

}  // namespace jax_ep
