#include "runtime/cuda/grouped_matmul_tables.h"

namespace jax_ep {
template struct gemm::Kernels<gemm::Family::gated>;
}
